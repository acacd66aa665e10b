"""MFU and its device, TensorBoard and W&B: what they show, and what is said where one is missing."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models.llama import LlamaConfig
from parallel import ParallelConfig, Precision
from recipes.find import find_recipe
from recipes.metrics import EvaluationMetrics, MetricsConfig, StepMetrics, find_utilization, open_sinks
from recipes.metrics.utilization import known_bfloat16_tflops
from recipes.recipe import Recipe
from recipes.train import train
from tests.ranks import run_ranks
from tests.recipes.small_recipe import small_recipe

# A module that stands in for W&B: it writes down what it is told.
WANDB = """
import json, os

class Run:
    def __init__(self, said):
        self.said = said
    def log(self, values, step):
        self.said.write(json.dumps(["log", values, step]) + "\\\\n")
    def finish(self):
        self.said.write(json.dumps(["finish"]) + "\\\\n")
        self.said.close()

def init(**options):
    if options["project"] == "forbidden":
        raise RuntimeError("no key")
    said = open(os.path.join(options["dir"], "wandb.jsonl"), "a")
    said.write(json.dumps(["init", options]) + "\\\\n")
    return Run(said)
""".replace("\\\\n", "\\n")


def _step(step: int, *, mfu: float | None = 0.25) -> StepMetrics:
    return StepMetrics(
        step=step,
        total_steps=4,
        epoch=0,
        loss=4.0 / step,
        gradient_norm=0.5,
        learning_rates={"matrices": 1e-3, "vectors": 1e-4},
        num_tokens=100,
        tokens_seen=100 * step,
        step_time_s=0.5,
        peak_bytes=1024,
        mfu=mfu,
    )


def _evaluation(step: int) -> EvaluationMetrics:
    return EvaluationMetrics(step=step, loss=3.0, num_tokens=50, time_s=1.0)


def _write(config: MetricsConfig, folder: Path, steps: range, *, resumed_step: int | None = None) -> None:
    sinks = open_sinks(config, folder / "metrics.jsonl", name="small", recipe={"a": 1}, resumed_step=resumed_step)
    for sink in sinks:
        for step in steps:
            sink.write(_step(step))
        sink.write(_evaluation(steps[-1]))
        sink.close()


def _events(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: {each.step: each.value for each in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_every_number_and_a_resume_hides_what_came_after_its_step(tmp_path: Path) -> None:
    config = MetricsConfig(tensorboard=True)
    _write(config, tmp_path, range(1, 4))
    shown = _events(tmp_path)
    assert shown["train/loss"] == {1: 4.0, 2: 2.0, 3: pytest.approx(4 / 3)}
    assert shown["train/learning_rate/matrices"][1] == pytest.approx(1e-3)
    assert shown["train/learning_rate/vectors"][1] == pytest.approx(1e-4)
    assert shown["train/mfu"][2] == 0.25
    assert shown["train/tokens_seen"][3] == 300
    assert shown["held_out/loss"] == {3: 3.0}
    _write(config, tmp_path, range(2, 5), resumed_step=1)
    assert _events(tmp_path)["train/loss"] == {1: 4.0, 2: 2.0, 3: pytest.approx(4 / 3), 4: 1.0}
    # A new run in the folder of an old one shows itself alone.
    _write(config, tmp_path, range(1, 2))
    assert _events(tmp_path)["train/loss"] == {1: 4.0}


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()


def _said(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "wandb.jsonl").read_text().splitlines()]


def test_wandb_gets_every_number_and_the_same_run_after_a_resume(tmp_path: Path, wandb: None) -> None:
    config = MetricsConfig(wandb_project="mine")
    _write(config, tmp_path, range(1, 2))
    (kind, options), (_, values, step), (_, held_out, held_out_step), end = _said(tmp_path)
    assert (kind, end) == ("init", ["finish"])
    assert {name: options[name] for name in ("project", "name", "resume", "dir", "config")} == {
        "project": "mine",
        "name": "small",
        "resume": "allow",
        "dir": str(tmp_path),
        "config": {"a": 1},
    }
    assert (values, step) == (_step(1).scalars(), 1)
    assert values["train/mfu"] == 0.25
    assert (held_out, held_out_step) == ({"held_out/loss": 3.0, "held_out/num_tokens": 50}, 1)
    _write(config, tmp_path, range(2, 3), resumed_step=1)
    assert _said(tmp_path)[4][1]["id"] == options["id"]
    _write(config, tmp_path, range(1, 2))
    assert _said(tmp_path)[8][1]["id"] != options["id"]
    with pytest.raises(ValueError, match="cannot log to W&B: no key; log in, set WANDB_MODE=offline"):
        _write(MetricsConfig(wandb_project="forbidden"), tmp_path, range(1, 2))


@pytest.mark.parametrize(
    ("config", "package"),
    [(MetricsConfig(tensorboard=True), "tensorboard"), (MetricsConfig(wandb_project="mine"), "wandb")],
)
def test_a_missing_package_is_named_with_its_extra_before_a_rank_starts(
    config: MetricsConfig, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    recipe = dataclasses.replace(small_recipe(tmp_path), metrics=config)
    message = rf"metrics are to go to {package}, which is not installed; pip install 'meshwright\[{package}\]'"
    with pytest.raises(ValueError, match=message):
        recipe.check(2)
    with pytest.raises(ValueError, match=message):
        _write(config, tmp_path, range(1, 2))


def test_nothing_that_is_not_asked_for_is_imported(tmp_path: Path) -> None:
    assert run_ranks(1, _imported_by_a_run, small_recipe(tmp_path)) == [[]]


def _imported_by_a_run(recipe: Recipe) -> list[str]:
    train(dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, steps=2)))
    return [name for name in ("tensorboard", "wandb") if name in sys.modules]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_known_gpu_is_found_by_its_name(name: str, expected: float | None) -> None:
    assert known_bfloat16_tflops(name) == expected


def test_mfu_takes_the_known_peak_in_bfloat16_and_the_configured_one_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    bfloat16 = ParallelConfig(precision=Precision(compute="bfloat16", reduce="float32"))

    def peak(config: MetricsConfig, layout: ParallelConfig, device: str) -> float | None:
        found = find_utilization(
            config,
            LlamaConfig.preset("llama3.1-8b").shape,
            layout,
            sequence_length=8192,
            device=torch.device(device),
            num_devices=8,
        )
        return None if found is None else found.peak_flops_per_s

    assert peak(MetricsConfig(), bfloat16, "cuda") == pytest.approx(989.4e12)
    assert peak(MetricsConfig(), ParallelConfig(), "cuda") is None
    assert peak(MetricsConfig(), bfloat16, "cpu") is None
    for device in ("cpu", "cuda"):
        assert peak(MetricsConfig(peak_tflops=0.5), bfloat16, device) == 0.5e12


def test_mfu_of_8b_equals_the_figure_by_hand() -> None:
    found = find_utilization(
        MetricsConfig(peak_tflops=989.4),
        find_recipe("llama_3_1_8b").model.shape,
        ParallelConfig(),
        sequence_length=8192,
        device=torch.device("cpu"),
        num_devices=64,
    )
    assert found
    # 4,194,304 tokens in 8 s take 57,914,449,920 FLOPs each, of 8 s x 64 x 989.4 TFLOP/s.
    assert found.of(4_194_304, 8.0) == pytest.approx(4_194_304 * 57_914_449_920 / (8 * 64 * 989.4e12))
    assert found.of(4_194_304, 0.0) == 0.0
    assert found.describe() == "MFU of 989.4 TFLOP/s a device, by full_attention: 57.9 GFLOPs a token"


def _records(recipe: Recipe, world_size: int) -> list[dict[str, Any]]:
    """What the file says of the steps of a run."""
    run_ranks(world_size, train, recipe)
    records = [json.loads(line) for line in recipe.output.metrics.read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(2, ParallelConfig()), (2, ParallelConfig(tp=2)), (4, ParallelConfig(tp=2))],
    ids=["full_shard 2", "tp 2", "full_shard 2 x tp 2"],
)
def test_tokens_loss_and_mfu_are_those_of_the_global_batch_on_every_mesh(
    world_size: int, parallel: ParallelConfig, tmp_path: Path, one_process: list[dict[str, Any]]
) -> None:
    recipe = dataclasses.replace(_reference(tmp_path), parallel=parallel)
    found = _records(recipe, world_size)
    for mine, one in zip(found, one_process, strict=True):
        assert mine["num_tokens"] == one["num_tokens"] <= 6 * 16
        assert mine["tokens_seen"] == one["tokens_seen"]
        assert mine["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert mine["learning_rates"] == one["learning_rates"]
        for record, devices in ((mine, world_size), (one, 1)):
            samples = 3 if record["step"] == 6 else 6
            assert record["mfu"] * record["step_time_s"] * devices == pytest.approx(samples * 16 * FLOPS / 1e9)
    assert [each["tokens_seen"] for each in found] == [
        sum(each["num_tokens"] for each in found[: number + 1]) for number in range(len(found))
    ]


# 6 x (32,160 - 260 x 32) parameters that are multiplied, and 12 x 2 layers x 32 x 16 of attention.
FLOPS = 6 * (32_160 - 8_320) + 12 * 2 * 32 * 16


def _reference(folder: Path) -> Recipe:
    """Seven steps, of which the sixth ends an epoch with 3 samples; a device of 1 GFLOP/s."""
    recipe = small_recipe(folder, training={"stored_dtype": "float64", "steps": 7})
    return dataclasses.replace(recipe, metrics=MetricsConfig(peak_tflops=1e-3))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _records(_reference(tmp_path_factory.mktemp("one")), 1)


def test_configs_out_of_range_are_refused() -> None:
    for values, message in (
        ({"flops": "half"}, "unknown flops 'half'; legal: full_attention, all_parameters, causal"),
        ({"peak_tflops": 0.0}, "peak_tflops=0.0 must be more than 0"),
        ({"wandb_project": " "}, "wandb_project is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            MetricsConfig(**values)
