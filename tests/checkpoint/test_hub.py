"""Hugging Face folders in and out, on any layout."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.hub import folder as hub_folder
from checkpoint.hub.folder import read_hub_config
from checkpoint.hub.load import load_hub
from checkpoint.hub.save import save_hub
from models import registry
from models.config import ModelConfig
from parallel import ParallelConfig, Trained, build_mesh, parallelize
from parallel.materialize import allocate
from parallel.replicas import local_part
from recipes.hub import hub_names
from tests.checkpoint.hub_folders import ARCHITECTURES, TOKENS, logits_by_transformers, make_folder
from tests.parallel.small_model import whole
from tests.ranks import run_ranks

ONE = ParallelConfig(data_parallel="none", dp_shard=1)


def config_of(path: Path) -> ModelConfig:
    return registry.from_hub_config(read_hub_config(path))


def empty_model(config: ModelConfig, layout: ParallelConfig) -> Trained:
    family = registry.family_of(config)
    with torch.device("meta"):
        model = family.build(config)
    trained = parallelize(model, build_mesh(layout, "cpu"), layout, family.plan(config))
    allocate(trained)
    return trained


def load(
    path: Path, layout: ParallelConfig, dtype: torch.dtype = torch.float32, cast: bool = False
) -> tuple[Trained, int]:
    config = config_of(path)
    trained = empty_model(config, layout)
    num_bytes = load_hub(path, trained, hub_names(config), cast=cast)
    return trained, num_bytes


def export(path: Path, trained: Trained, config: ModelConfig, **options: Any) -> Path:
    values = registry.hub_format(config).to_config(config)
    return save_hub(path, trained, values, hub_names(config).places(None), **options)


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: each for file in sorted(path.glob("*.safetensors")) for name, each in load_file(file).items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.dtype == other[name].dtype and torch.equal(values, other[name]), name


def held_bytes(trained: Trained) -> int:
    return sum(local_part(each).nbytes for each in trained.named_parameters().values())


def import_and_export(path: str, out: str, layout: ParallelConfig, options: dict[str, Any]) -> tuple[Tensor, int, int]:
    """Logits of the imported model, bytes that this rank read, and bytes that it holds."""
    trained, num_bytes = load(Path(path), layout)
    export(Path(out), trained, config_of(Path(path)), **options)
    held = sum(
        each.to_local().nbytes if hasattr(each, "to_local") else each.nbytes
        for each in trained.named_parameters().values()
    )
    return trained.logits(TOKENS), num_bytes, held


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_computes_the_logits_of_transformers_and_comes_back_bit_by_bit(
    name: str, tmp_path: Path
) -> None:
    path = make_folder(tmp_path / "theirs", name)
    ((logits, _, _),) = run_ranks(1, import_and_export, str(path), str(tmp_path / "ours"), ONE, {})
    expected = logits_by_transformers(path, TOKENS)
    assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5
    assert_equal(tensors_of(tmp_path / "ours"), tensors_of(path))
    assert torch.equal(logits_by_transformers(tmp_path / "ours", TOKENS), expected)
    assert sorted(each.name for each in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]


LAYOUTS = {
    "fsdp 2 x tp 2": ParallelConfig(dp_shard=2, tp=2),
    "hsdp 2 x 2": ParallelConfig(dp_replicate=2, dp_shard=2, strategy="hybrid_shard"),
    "ddp 2 x tp 2": ParallelConfig(data_parallel="ddp", dp_replicate=2, dp_shard=1, tp=2),
    "fsdp1 4": ParallelConfig(data_parallel="fsdp1", dp_shard=4),
    "pp 2 x fsdp 2": ParallelConfig(pp=2, schedule="1f1b", dp_shard=2),
    "ep 2 x fsdp 2": ParallelConfig(dp_shard=4, ep=2),
    "ep 2 x tp 2": ParallelConfig(dp_shard=2, tp=2, ep=2),
}
DENSE = [layout for layout in LAYOUTS if not layout.startswith("ep")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("qwen2", layout) for layout in DENSE),
        *(("qwen3", layout) for layout in DENSE),
        *(("qwen3_moe", layout) for layout in ("pp 2 x fsdp 2", "ep 2 x fsdp 2", "ep 2 x tp 2")),
    ],
)
def test_any_layout_imports_its_slices_alone_and_exports_the_same_bytes_into_many_files(
    layout: str, name: str, tmp_path: Path
) -> None:
    path = make_folder(tmp_path / "theirs", name, file_bytes=4000)
    assert (path / "model.safetensors.index.json").exists()
    out = tmp_path / "ours"
    ranks = run_ranks(4, import_and_export, str(path), str(out), LAYOUTS[layout], {"max_file_bytes": 5000})
    expected = logits_by_transformers(path, TOKENS)
    for logits, num_bytes, held in ranks:
        assert ((logits - expected).abs().max() / expected.abs().max()).item() < 1e-5
        # fsdp1 cuts all parameters of a unit laid end to end, not each by rows, but no part is read twice.
        assert num_bytes == held or layout == "fsdp1 4"
    if layout == "fsdp1 4":
        assert sum(each[1] for each in ranks) == sum(each.nbytes for each in tensors_of(path).values())
    assert_equal(tensors_of(out), tensors_of(path))
    assert torch.equal(logits_by_transformers(out, TOKENS), expected)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    on_disk: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            on_disk |= dict.fromkeys(opened.keys(), file.name)
            assert opened.metadata() == {"format": "pt"}
    assert index["weight_map"] == on_disk
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors_of(out).values())


def cast_there_and_back(path: str, folder: str) -> None:
    trained, num_bytes = load(Path(path), ParallelConfig(dp_shard=2), cast=True)
    assert num_bytes == held_bytes(trained) // 2
    config = config_of(Path(path))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        export(Path(folder) / str(dtype), trained, config, dtype=dtype)
    with pytest.raises(ValueError, match=r"(?s)does not fit.*dtype.*lm_head.weight: torch.bfloat16 in the folder"):
        load(Path(path), ParallelConfig(dp_shard=2))


def test_values_are_cast_when_that_is_asked_for_and_then_alone(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "theirs", dtype=torch.bfloat16)
    theirs = tensors_of(path)
    run_ranks(2, cast_there_and_back, str(path), str(tmp_path))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = tmp_path / str(dtype)
        assert_equal(tensors_of(out), {name: each.to(dtype) for name, each in theirs.items()})
        assert read_hub_config(out)["torch_dtype"] == str(dtype).removeprefix("torch.")
        logits_by_transformers(out, TOKENS)


def refused(path: str, message: str, layout: ParallelConfig) -> None:
    config = config_of(Path(path))
    trained = empty_model(config, layout)
    with pytest.raises(ValueError, match=message):
        load_hub(path, trained, hub_names(config))
    assert all(whole(each).isnan().all() for each in trained.named_parameters().values())


def change(path: Path, tensors: dict[str, Tensor | None]) -> None:
    """Replaces tensors of a folder of one file, or removes them."""
    kept = {name: each for name, each in (tensors_of(path) | tensors).items() if each is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def test_all_that_does_not_fit_is_listed_on_every_rank_before_anything_is_changed(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "theirs")
    change(
        path,
        {
            "model.norm.weight": None,
            "model.layers.0.mlp.up_proj.weight": torch.zeros(41, 24),
            "model.layers.0.mlp.up_proj.bias": torch.zeros(40),
            "model.layers.1.mlp.up_proj.weight": torch.zeros(40, 24, dtype=torch.int32),
        },
    )
    message = r"(?s)missing .*\(1\):\n  model.norm.weight\n.*only \(1\):\n  model.layers.0.mlp.up_proj.bias\n.*" + (
        r"shape \(1\):\n  model.layers.0.mlp.up_proj.weight: \[41, 24\] in the folder, \[40, 24\] in the model\n.*"
        r"dtype \(1\):\n  model.layers.1.mlp.up_proj.weight: torch.int32"
    )
    run_ranks(2, refused, str(path), message, ParallelConfig(dp_shard=2))


def tied_from(path: str) -> Tensor:
    trained, _ = load(Path(path), ParallelConfig(dp_shard=2))
    assert "head.weight" not in trained.named_parameters()
    return whole(trained.named_parameters()["embed.weight"])


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_weight_is_found_under_either_name(kept: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "theirs", "smollm2")
    embed = tensors_of(path)["model.embed_tokens.weight"]
    both = {"model.embed_tokens.weight": embed, "lm_head.weight": embed.clone()}
    change(path, {name: each if kept in (name, "both") else None for name, each in both.items()})
    for found in run_ranks(2, tied_from, str(path)):
        assert torch.equal(found, embed)


def test_tied_weights_that_differ_on_one_rank_alone_are_refused(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "theirs", "smollm2")
    other = tensors_of(path)["model.embed_tokens.weight"].clone()
    other[-1, -1] += 1
    change(path, {"lm_head.weight": other})
    message = "model.embed_tokens.weight and lm_head.weight differ, but the config ties them"
    run_ranks(2, refused, str(path), message, ParallelConfig(dp_shard=2))


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "theirs")
    change(path, {"lm_head.weight": None})
    run_ranks(1, refused, str(path), r"missing from .*\n  lm_head.weight", ONE)


def test_rotary_frequencies_of_old_folders_are_no_difference(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "theirs")
    change(path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    run_ranks(1, loads, str(path))


def loads(path: str) -> None:
    load(Path(path), ONE)


def write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


FOLDERS: dict[str, tuple[Any, str]] = {
    "no file": (lambda path: (path / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    "both": (lambda path: write_index(path, {"a": "model.safetensors"}), "remove the one that is not meant"),
    "a file outside": (lambda path: indexed(path, {"a": "../model.safetensors"}), "no name of a file beside it"),
    "an absolute file": (lambda path: indexed(path, {"a": "/etc/x.safetensors"}), "no name of a file beside it"),
    "another file": (lambda path: indexed(path, {"a": "config.json"}), "no name of a file beside it"),
    "a file that is missing": (lambda path: indexed(path, {"a": "b.safetensors"}), "b.safetensors is not there"),
    "a tensor that is missing": (lambda path: indexed(path, {"a": "x.safetensors"}), "do not agree on 22 tensors"),
    "a map that is none": (lambda path: indexed(path, ["x.safetensors"]), "weight_map must be a JSON object"),
    "a map of numbers": (lambda path: indexed(path, {"a": 3}), "lists the file '3'"),
    "a pipe": (lambda path: piped(path), "is not a plain file"),
    "half a file": (lambda path: os.truncate(path / "model.safetensors", 9000), "its tensors end at byte"),
}


def indexed(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors").rename(path / "x.safetensors")
    write_index(path, weight_map)


def piped(path: Path) -> None:
    (path / "model.safetensors").rename(path / "y.safetensors")
    os.mkfifo(path / "x.safetensors")
    write_index(path, {"a": "x.safetensors"})


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "theirs")
    spoil, message = FOLDERS[name]
    spoil(path)
    with pytest.raises(ValueError, match=message):
        hub_folder.open_hub_folder(path)


def test_links_are_followed_as_the_cache_of_the_hub_consists_of_them(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "theirs")
    (path / "model.safetensors").rename(tmp_path / "blob")
    (path / "model.safetensors").symlink_to("../blob")
    assert hub_folder.is_hub_folder(path)
    assert len(hub_folder.open_hub_folder(path).tensors) == 21


@pytest.mark.parametrize("text", ["[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": ' + "[" * 100_000, "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_hub_config(tmp_path)


def export_what_overflows(path: str, out: str) -> None:
    trained, _ = load(Path(path), ParallelConfig(dp_shard=2))
    config = config_of(Path(path))
    with pytest.raises(ValueError, match=r"model.norm.weight: values up to 1e\+06 are beyond 65504"):
        export(Path(out), trained, config, dtype=torch.float16)
    with pytest.raises(ValueError, match="is there already; name a new folder"):
        export(Path(path), trained, config)
    with pytest.raises(ValueError, match="max_file_bytes=0 must be positive"):
        export(Path(out), trained, config, max_file_bytes=0)


def test_an_export_that_cannot_be_leaves_nothing_behind(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "theirs")
    change(path, {"model.norm.weight": torch.full((24,), 1e6)})
    before = tensors_of(path)
    run_ranks(2, export_what_overflows, str(path), str(tmp_path / "ours"))
    assert [each.name for each in tmp_path.iterdir()] == ["theirs"]
    assert_equal(tensors_of(path), before)


def peak_of_import_and_export(path: str, out: str, layout: ParallelConfig) -> tuple[int, int, int]:
    """Bytes of this rank's shards, and how much more memory importing and exporting took at their peaks."""
    config = config_of(Path(path))
    trained, names = empty_model(config, layout), hub_names(config)
    peaks = []
    for action in (
        lambda: load_hub(path, trained, names, cast=True),
        lambda: export(Path(out), trained, config, dtype=torch.bfloat16),
    ):
        Path("/proc/self/clear_refs").write_text("5")
        before = _high_water_bytes()
        action()
        peaks.append(_high_water_bytes() - before)
    return held_bytes(trained), peaks[0], peaks[1]


def _high_water_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell peaks of memory")
@pytest.mark.parametrize("layout", [ParallelConfig(dp_shard=2), ParallelConfig(dp_shard=1, tp=2)])
def test_a_rank_needs_its_shard_a_tenth_and_a_block_to_import_and_export(
    layout: ParallelConfig, tmp_path: Path
) -> None:
    path = make_folder(
        tmp_path / "theirs", dtype=torch.bfloat16, vocab_size=100_000, hidden_size=240, intermediate_size=4000
    )
    for shard, importing, exporting in run_ranks(2, peak_of_import_and_export, str(path), str(tmp_path / "x"), layout):
        assert shard > 90 << 20
        # Two threads have a block each; the rest is Python's.
        assert importing < shard // 10 + (4 << 20)
        assert exporting < shard // 10 + (4 << 20)
