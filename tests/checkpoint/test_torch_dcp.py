"""Folders of torch.distributed.checkpoint and files of torch.save, in our names and in torchtitan's."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp

from checkpoint.foreign.dcp import load_dcp, save_dcp
from checkpoint.foreign.match import Keys, turned
from checkpoint.foreign.torch_file import load_torch_file
from models.hub import TitanKey
from models.llama import LlamaConfig, titan_key
from parallel import ParallelConfig, Trained
from parallel.replicas import local_part
from tests.parallel.small_model import build, whole
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

CONFIG = LlamaConfig(num_layers=2, width=24, num_heads=6, num_kv_heads=2, head_dim=4, vocab_size=260)
TIED = LlamaConfig(num_layers=1, width=24, num_heads=6, num_kv_heads=2, tied_embeddings=True)


def keys_of(trained: Trained, names: str, config: LlamaConfig = CONFIG) -> Keys:
    fqns = trained.named_parameters()
    return {fqn: TitanKey(name=fqn) if names == "ours" else titan_key(config, fqn) for fqn in fqns}


def values_of(trained: Trained) -> dict[str, Tensor]:
    return {fqn: whole(each) for fqn, each in trained.named_parameters().items()}


def empty(layout: ParallelConfig, config: LlamaConfig = CONFIG) -> Trained:
    trained = build(layout, config, dtype=torch.float32, seed=7)
    for parameter in trained.named_parameters().values():
        with torch.no_grad():
            parameter.fill_(float("nan"))
    return trained


def there_and_back(folder: str, names: str, one: ParallelConfig, other: ParallelConfig, config: LlamaConfig) -> bool:
    trained = build(one, config, dtype=torch.float32)
    save_dcp(folder, trained, keys_of(trained, names, config))
    with pytest.raises(ValueError, match="is there already"):
        save_dcp(folder, trained, keys_of(trained, names, config))
    back = empty(other, config)
    with pytest.raises(ValueError, match="can run any code; pass allow_pickle=True"):
        load_dcp(folder, back, keys_of(back, names, config))
    load_dcp(folder, back, keys_of(back, names, config), allow_pickle=True)
    before, after = values_of(trained), values_of(back)
    return before.keys() == after.keys() and all(torch.equal(after[fqn], each) for fqn, each in before.items())


@pytest.mark.parametrize("names", ["ours", "torchtitan"])
@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_a_model_goes_through_a_folder_of_torch_onto_another_layout_bit_by_bit(
    names: str, config: LlamaConfig, tmp_path: Path
) -> None:
    one, other = ParallelConfig(dp_shard=4), ParallelConfig(dp_shard=2, tp=2)
    assert all(run_ranks(4, there_and_back, str(tmp_path / "x"), names, one, other, config))


def write_titan(folder: str) -> dict[str, Tensor]:
    trained = build(ParallelConfig(dp_shard=2), CONFIG, dtype=torch.float32)
    save_dcp(folder, trained, keys_of(trained, "torchtitan"))
    return values_of(trained)


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, as somebody who knows nothing of us reads it."""
    reader = dcp.FileSystemReader(folder)
    found: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in found.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def meta_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding on complex pairs of neighbours, [..., K], as Meta's code has it."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def half_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding on the two halves of a head."""
    one, other = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def test_queries_and_keys_give_the_same_scores_with_the_rotary_embedding_of_torchtitan(tmp_path: Path) -> None:
    ours = run_ranks(2, write_titan, str(tmp_path / "x"))[0]
    titan = read_all(tmp_path / "x")
    assert set(titan) == {titan_key(CONFIG, fqn).name for fqn in ours}
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(5)[:, None, None] * torch.tensor([1.0, 0.01])
    scores = []
    for rotary, query, key in (
        (half_rotary, ours["blocks.1.attention.q_proj.weight"], ours["blocks.1.attention.k_proj.weight"]),
        (meta_rotary, titan["layers.1.attention.wq.weight"], titan["layers.1.attention.wk.weight"]),
    ):
        q, k = ((x @ weight.T).unflatten(-1, (-1, 4)) for weight in (query, key))
        scores.append(torch.einsum("shk,thk->hst", rotary(q, angles), rotary(k, angles).repeat_interleave(3, dim=1)))
    assert not torch.equal(ours["blocks.1.attention.q_proj.weight"], titan["layers.1.attention.wq.weight"])
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-6)


def test_rows_are_turned_by_the_heads_of_queries_or_of_keys() -> None:
    rows = torch.arange(8.0)
    assert turned(rows, 2, ours=False).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(turned(turned(rows, 2, ours=False), 2, ours=True), rows)


def refused(folder: str, cast: bool, message: str) -> None:
    trained = empty(ParallelConfig(dp_shard=2))
    with pytest.raises(ValueError, match=message):
        load_dcp(folder, trained, keys_of(trained, "torchtitan"), allow_pickle=True, cast=cast)
    assert all(each.isnan().all() for each in values_of(trained).values())


def test_a_folder_of_torch_that_does_not_fit_is_refused_with_all_differences(tmp_path: Path) -> None:
    run_ranks(2, write_titan, str(tmp_path / "x"))
    state = read_all(tmp_path / "x")
    state["norm.weight"] = state["norm.weight"].bfloat16()
    state["output.weight"] = torch.zeros(261, 24)
    state["rope.bias"] = torch.zeros(3)
    state["optimizer.norm.weight"] = torch.zeros(3)
    del state["tok_embeddings.weight"]
    dcp.save(state, checkpoint_id=tmp_path / "y", no_dist=True)
    message = (
        r"(?s)missing .*\(1\):\n  tok_embeddings.weight\n.*only \(1\):\n  rope.bias\n.*shape \(1\):\n  output.weight: "
        r"\[261, 24\] there, \[260, 24\] in the model\n"
    )
    run_ranks(2, refused, str(tmp_path / "y"), False, message + r".*dtype \(1\):\n  norm.weight: torch.bfloat16 there")
    run_ranks(2, refused, str(tmp_path / "y"), True, message.removesuffix(r"\n") + "$")
    run_ranks(2, refused, str(tmp_path), True, "holds no .metadata")


def load_file(path: str, names: str, layout: ParallelConfig) -> dict[str, Tensor]:
    trained = empty(layout)
    load_torch_file(path, trained, keys_of(trained, names), cast=True)
    return values_of(trained)


def test_a_file_of_torch_save_is_read_whatever_wrappers_have_put_into_its_names(tmp_path: Path) -> None:
    ours = run_ranks(2, write_titan, str(tmp_path / "x"))[0]
    wrapped = {
        f"module._orig_mod.{fqn.replace('attention.', '_checkpoint_wrapped_module.attention._orig_mod.')}": each
        for fqn, each in ours.items()
    }
    torch.save({"state_dict": wrapped, "step": 3}, tmp_path / "ours.pt")
    titan = read_all(tmp_path / "x")
    torch.save({"model": {name: each.bfloat16() for name, each in titan.items()}}, tmp_path / "titan.pt")
    found = run_ranks(2, load_file, str(tmp_path / "ours.pt"), "ours", ParallelConfig(dp_shard=2))
    assert all(torch.equal(each, ours[fqn]) for values in found for fqn, each in values.items())
    tp = ParallelConfig(dp_shard=1, tp=2)
    for values in run_ranks(2, load_file, str(tmp_path / "titan.pt"), "torchtitan", tp):
        assert all(torch.equal(each, ours[fqn].bfloat16().float()) for fqn, each in values.items())


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def refused_file(path: str, message: str) -> None:
    trained = empty(ParallelConfig(data_parallel="none", dp_shard=1))
    with pytest.raises(ValueError, match=message):
        load_torch_file(path, trained, keys_of(trained, "ours"))


def test_a_file_that_would_run_code_or_holds_no_tensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"embed.weight": torch.zeros(1), "x": Evil()}}, tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("no file of torch")
    run_ranks(1, refused_file, str(tmp_path / "evil.pt"), "cannot be read with weights_only")
    run_ranks(1, refused_file, str(tmp_path / "list.pt"), "holds no mapping")
    run_ranks(1, refused_file, str(tmp_path / "text.pt"), "cannot be read|mmap")
    assert not (tmp_path / "executed").exists()


@contextmanager
def failing(call: str, failure: OSError | None) -> Iterator[None]:
    """Lets a call of torch's writer fail on this rank, or not."""
    if failure is None:
        yield
        return
    with patch.object(dcp.FileSystemWriter, call, side_effect=failure):
        yield


def interrupted(folder: str) -> tuple[list[int], int]:
    trained = build(ParallelConfig(), CONFIG, dtype=torch.float32)
    told: list[int] = []
    failure = OSError(errno.ENOSPC, "No space left on device") if dist.get_rank() == 1 else None
    with (
        failing("write_data", failure),
        pytest.raises(OSError, match=r"could not export .*rank 1: .*No space") as no_space,
    ):
        save_dcp(folder, trained, keys_of(trained, "ours"))
    assert no_space.value.errno == errno.ENOSPC
    dist.barrier()
    assert os.listdir(Path(folder).parent) == []
    dist.barrier()
    save_dcp(folder, trained, keys_of(trained, "ours"), progress=told.append)
    load_dcp(folder, trained, keys_of(trained, "ours"), allow_pickle=True, progress=told.append)
    return told, sum(local_part(each).nbytes for each in trained.named_parameters().values())


def test_an_export_that_fails_leaves_nothing_and_progress_tells_of_all_bytes(tmp_path: Path) -> None:
    for told, num_bytes in run_ranks(2, interrupted, str(tmp_path / "dcp")):
        assert sum(told) == 2 * num_bytes and len(told) > 10
    assert os.listdir(tmp_path) == ["dcp"]
