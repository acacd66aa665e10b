"""Names in checkpoints do not tell what was wrapped around modules: each way of training goes on from each other."""

from pathlib import Path
from typing import Any
from unittest import mock

from checkpoint import load, read_manifest, save
from parallel import compile as compiling
from tests.checkpoint.states import forget_meshes
from tests.checkpoint.test_every_pair import Seen, digests, go_on, new_state
from tests.parallel.small_model import difference
from tests.ranks import run_ranks

PLAIN: dict[str, Any] = {"strategy": "no_shard"}
CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": "full"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "compiled": {**PLAIN, "compile": True},
    "checkpointed": {**PLAIN, **CHECKPOINTED},
    "ddp": {"data_parallel": "ddp"},
    "checkpointed and compiled": {**PLAIN, **CHECKPOINTED, "compile": True},
    "fsdp2": {},
}


def save_and_load_all(root: Path) -> tuple[dict[str, Seen], dict[tuple[str, str], Seen]]:
    """What each way held when it saved and how it went on, and the same after each load of each."""
    saved, loaded = {}, {}
    # The graph is what wraps; generating code for it would take minutes.
    with mock.patch.object(compiling, "BACKEND", "eager"):
        for name, fields in WAYS.items():
            forget_meshes()
            state = new_state(fields)
            go_on(state)
            save(root / name, state)
            saved[name] = Seen(digests(state), go_on(state))
        for name, fields in WAYS.items():
            forget_meshes()
            state = new_state(fields)
            for source in WAYS:
                load(root / source, state)
                loaded[source, name] = Seen(digests(state), go_on(state))
    return saved, loaded


def test_each_way_of_training_goes_on_from_each_other_with_the_same_names(tmp_path: Path) -> None:
    (saved, loaded), _ = run_ranks(2, save_and_load_all, tmp_path, timeout_s=120)
    keys = {name: set(read_manifest(tmp_path / name / "step-00000005").tensors) for name in WAYS}
    assert all(each == keys["plain"] for each in keys.values())
    assert {"model.blocks.0.attention.q_proj.weight", "optimizer.norm.weight.exp_avg"} < keys["plain"]
    assert len(loaded) == 36
    for (source, target), seen in loaded.items():
        assert seen.digests == saved[source].digests, f"{source} -> {target}"
        assert difference(seen.losses, saved[source].losses) < 1e-12, f"{source} -> {target}"
