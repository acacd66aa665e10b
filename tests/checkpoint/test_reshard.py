"""Every layout loads what every other one saved."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open

from checkpoint import TrainState, load, read_manifest, save, verify
from checkpoint.manifest import file_name
from checkpoint.reader import ShardReader
from tests.checkpoint import states
from tests.checkpoint.states import Counter
from tests.ranks import run_ranks

BY_WORLD_SIZE = {2: ["fsdp 2", "tp 2"], 3: ["fsdp 3"], 4: ["fsdp 2 x tp 2", "hsdp 2 x 2"], 6: ["fsdp 3 x tp 2"]}
NAMES = ["one process", *states.LAYOUTS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which each layout saved once."""
    root = tmp_path_factory.mktemp("layouts")
    save_filled(root, ["one process"])
    for world_size, layouts in BY_WORLD_SIZE.items():
        run_ranks(world_size, save_filled, root, layouts)
    return root


def save_filled(root: Path, layouts: list[str]) -> None:
    states.forget_meshes()
    for layout in layouts:
        state = states.fill(states.new_state(layout))
        assert states.wrong_tensors(state) == []
        save(root / layout, state)


def load_all(root: Path, layouts: list[str]) -> list[str]:
    """What is wrong after loading each checkpoint into a fresh state of each layout."""
    states.forget_meshes()
    wrong = []
    for layout in layouts:
        for source in NAMES:
            state = states.new_state(layout)
            load(root / source, state)
            wrong += [f"{source} -> {layout}: {name}" for name in states.wrong_tensors(state)]
            wrong += [f"{source} -> {layout}: {what}" for what in wrong_rest(state)]
    return wrong


def wrong_rest(state: TrainState) -> list[str]:
    assert state.optimizer is not None
    counter = state.stateful["data"]
    assert isinstance(counter, Counter)
    values = {
        "step": state.step == 42,
        "num_tokens": state.num_tokens == 1000,
        "data": counter.position == 7,
        "decay": [group["weight_decay"] for group in state.optimizer.param_groups] == [0.1, 0.0],
        "betas": all(group["betas"] == (0.9, 0.999) for group in state.optimizer.param_groups),
        "recipe": state.recipe == {},
    }
    return [name for name, right in values.items() if not right]


def test_one_process_loads_every_layout_bitwise(saved: Path) -> None:
    assert load_all(saved, ["one process"]) == []


@pytest.mark.parametrize("world_size", BY_WORLD_SIZE)
def test_layouts_load_every_layout_bitwise(saved: Path, world_size: int) -> None:
    for wrong in run_ranks(world_size, load_all, saved, BY_WORLD_SIZE[world_size]):
        assert wrong == []


def test_a_checkpoint_holds_safetensors_digests_and_json_alone(saved: Path) -> None:
    for layout in NAMES:
        path = saved / layout / "step-00000042"
        files = read_manifest(path).files
        digests = [name.replace(".safetensors", ".digests") for name in files]
        assert sorted(os.listdir(path)) == sorted(["manifest.json", *files, *digests])
        assert [path.name for path in (saved / layout).iterdir()] == ["step-00000042"]
        verify(path)


def test_what_saves_and_loads_checkpoints_knows_no_pickle() -> None:
    root = Path(__file__).parents[2] / "checkpoint"
    files = [path for path in root.rglob("*.py") if path.parent.name != "foreign"]
    assert len(files) > 30
    for path in files:
        text = path.read_text()
        for word in ("pickle", "torch.load", "torch.save", "checkpoint.foreign"):
            assert word not in text, path.name


def test_replicated_tensors_are_written_once(saved: Path) -> None:
    def num_bytes(layout: str) -> int:
        total = 0
        for file in (saved / layout / "step-00000042").glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                total += sum(opened.get_tensor(key).nbytes for key in opened.keys() if not key.startswith("rng."))  # noqa: SIM118
        return total

    assert {num_bytes(layout) for layout in NAMES} == {num_bytes("one process")}
    sizes = [each.num_bytes for each in read_manifest(saved / "hsdp 2 x 2" / "step-00000042").files.values()]
    assert len(sizes) == 4


def test_the_manifest_tells_the_layout_that_wrote_it(saved: Path) -> None:
    header = read_manifest(saved / "fsdp 2 x tp 2" / "step-00000042").header
    assert header.world_size == 4
    assert (header.layout["dp_shard"], header.layout["tp"], header.layout["data_parallel"]) == (2, 2, "fsdp2")
    assert header.recipe == {"name": "toy", "sizes": [1, 2]}
    assert (header.step, header.num_tokens) == (42, 1000)


def test_the_model_alone_loads_and_leaves_the_rest(saved: Path) -> None:
    state = states.new_state()
    state.optimizer = None
    before = torch.get_rng_state()
    load(saved / "fsdp 3", state, parts=("model",))
    assert states.wrong_tensors(state) == []
    assert (state.step, state.num_tokens) == (0, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_shards_of_the_same_layout_come_from_the_rank_s_own_file(saved: Path) -> None:
    assert run_ranks(2, files_opened_by_load, saved / "fsdp 2", "fsdp 2") == [
        {"rank-00000.safetensors"},
        {"rank-00001.safetensors"},
    ]


def files_opened_by_load(path: Path, layout: str) -> set[str]:
    states.forget_meshes()
    state = states.new_state(layout)
    opened = []
    original = ShardReader.file

    def record(reader: ShardReader, rank: int) -> Any:
        opened.append(file_name(rank))
        return original(reader, rank)

    with patch.object(ShardReader, "file", record):
        # The optimizer's step counts are replicated and lie in one file or the other.
        load(path, state, parts=("model", "rng"))
    return set(opened)
