"""Who writes what follows from mesh and splits alone."""

import time
from collections.abc import Iterator
from math import prod
from typing import TypeVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from checkpoint import owners, save_plan
from checkpoint.boxes import Box, chunk, intervals, whole
from checkpoint.layout import Layout, replicated
from checkpoint.manifest import Header, Manifest, StoredFile, file_name
from checkpoint.owners import Owners, Piece, StoredTensor
from checkpoint.placed import part_of_job
from checkpoint.ranks import Ranks
from checkpoint.state import FlatState
from tests.checkpoint.folders import part

T = TypeVar("T")
AXES = ("a", "b", "c", "d")


@st.composite
def stored_tensors(draw: st.DrawFn) -> tuple[int, dict[str, StoredTensor]]:
    """Tensors of odd shapes on one mesh, cut along any of its axes in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mesh = tuple(zip(AXES, sizes, strict=False))
    tensors = {}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        axes = draw(st.permutations([axis for axis, _ in mesh]))[: draw(st.integers(0, len(mesh)))]
        splits = tuple((axis, draw(st.integers(0, len(shape) - 1))) for axis in axes) if shape else ()
        left = [axis for axis, _ in mesh if axis not in dict(splits)]
        at = (
            ((left[0], draw(st.integers(0, dict(mesh)[left[0]] - 1))),)
            if left and draw(st.sampled_from([True, False]))
            else ()
        )
        dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.bool]))
        tensors[f"t{number}"] = StoredTensor(dtype=dtype, shape=shape, layout=Layout(mesh, splits, at))
    return prod(sizes), tensors


@pytest.fixture(autouse=True, params=[1, owners.MIN_STRETCH_BYTES], ids=["all shared out", "as saved"])
def min_stretch(request: pytest.FixtureRequest) -> Iterator[None]:
    with patch.object(owners, "MIN_STRETCH_BYTES", request.param):
        yield


ANY_STRETCH = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY_STRETCH
@given(stored_tensors())
def test_what_all_ranks_write_makes_up_each_tensor_once(case: tuple[int, dict[str, StoredTensor]]) -> None:
    world_size, tensors = case
    found_by = Owners(tensors)
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in tensors.items()}
    for rank in range(world_size):
        for piece in found_by.of_rank(rank):
            assert piece.rank == rank
            assert tensors[piece.name].layout.holds(rank)
            held = held_box(tensors[piece.name], rank)
            assert held.overlap(piece.box) == piece.box
            part(counts[piece.name], piece.box).add_(1)
    assert all(bool((count == 1).all()) for count in counts.values())


def held_box(tensor: StoredTensor, rank: int) -> Box:
    return tensor.layout.box(tensor.shape, {axis: tensor.layout.coordinate(rank, axis) for axis in tensor.layout.sizes})


@ANY_STRETCH
@given(stored_tensors(), st.data())
def test_a_reader_finds_exactly_the_pieces_that_were_written(
    case: tuple[int, dict[str, StoredTensor]], data: st.DataObject
) -> None:
    world_size, tensors = case
    found_by = Owners(tensors)
    written = [piece for rank in range(world_size) for piece in found_by.of_rank(rank)]
    for name, tensor in tensors.items():
        offsets = tuple(data.draw(st.integers(0, size)) for size in tensor.shape)
        sizes = tuple(
            data.draw(st.integers(0, size - offset)) for size, offset in zip(tensor.shape, offsets, strict=True)
        )
        box = Box(offsets, sizes)
        expected = {piece for piece in written if piece.name == name and piece.box.overlap(box) is not None}
        assert set(found_by.overlapping(name, box)) == expected


@ANY_STRETCH
@given(st.integers(0, 40), st.lists(st.integers(1, 5), max_size=3))
def test_intervals_are_those_of_chunk_after_chunk(size: int, parts: list[int]) -> None:
    expected = [torch.arange(size)]
    for number in parts:
        expected = [
            piece[start : start + length]
            for piece in expected
            for start, length in (chunk(len(piece), number, index) for index in range(number))
        ]
    found = [list(range(start, start + length)) for _, start, length in intervals(size, parts, 0, size)]
    assert found == [piece.tolist() for piece in expected if len(piece)]
    if len(parts) == 1 and size:
        assert found == [each.tolist() for each in torch.arange(size).chunk(parts[0])]


def llama(mesh: tuple[tuple[str, int], ...], num_layers: int) -> dict[str, StoredTensor]:
    """Parameters and AdamW state of a model of 4,096 wide, cut as FSDP2 and tensor parallelism cut them."""
    width, hidden, vocab = 4096, 14_336, 128_256
    axes = dict(mesh)
    column = (("tp", 0), ("fsdp", 0)) if "tp" in axes else (("fsdp", 0),)
    row = (("fsdp", 0), ("tp", 1)) if "tp" in axes else (("fsdp", 0),)
    rows = (("fsdp", 0),)
    shapes = {"embed": ((vocab, width), column), "head": ((vocab, width), column), "norm": ((width,), rows)}
    for layer in range(num_layers):
        for name, shape, splits in (
            ("q", (width, width), column),
            ("k", (1024, width), column),
            ("v", (1024, width), column),
            ("o", (width, width), row),
            ("gate", (hidden, width), column),
            ("up", (hidden, width), column),
            ("down", (width, hidden), row),
            ("norm1", (width,), rows),
            ("norm2", (width,), rows),
        ):
            shapes[f"blocks.{layer}.{name}"] = (shape, splits)
    return {
        f"{kind}{name}": StoredTensor(dtype=torch.float32, shape=shape, layout=Layout(mesh, splits))
        for kind in ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
        for name, (shape, splits) in shapes.items()
    } | {
        f"optimizer.{name}.step": StoredTensor(dtype=torch.float32, shape=(), layout=replicated(prod(axes.values())))
        for name in shapes
    }


def num_bytes(piece: Piece, tensors: dict[str, StoredTensor]) -> int:
    return prod(piece.box.sizes) * tensors[piece.name].dtype.itemsize


MESHES = {
    "fsdp 8": (("fsdp", 8),),
    "ddp 8": (("dp_replicate", 8), ("fsdp", 1)),
    "hsdp 2 x 4": (("dp_replicate", 2), ("fsdp", 4)),
    "hsdp 2 x 2 x tp 2": (("dp_replicate", 2), ("fsdp", 2), ("tp", 2)),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_busiest_rank_writes_at_most_a_twentieth_more_than_the_mean(mesh: str) -> None:
    tensors = llama(MESHES[mesh], num_layers=2)
    found_by = Owners(tensors)
    written = [sum(num_bytes(piece, tensors) for piece in found_by.of_rank(rank)) for rank in range(8)]
    assert sum(written) == sum(tensor.num_bytes for tensor in tensors.values())
    assert max(written) <= 1.05 * sum(written) / 8


def test_a_plan_of_1024_ranks_and_1000_tensors_is_cheap_and_its_manifest_small() -> None:
    mesh = (("dp_replicate", 4), ("fsdp", 64), ("tp", 4))
    tensors = llama(mesh, num_layers=28)
    assert len(tensors) > 1000
    start_s = time.process_time()
    pieces = Owners(tensors).of_rank(777)
    planned_s = time.process_time() - start_s
    assert planned_s < 2
    assert len(pieces) > 100
    files = {file_name(rank): StoredFile(num_bytes=1 << 40, digest="0" * 16) for rank in range(1024)}
    header = Header(step=1, num_tokens=1, world_size=1024)
    text = Manifest(header=header, tensors=tensors, files=files).to_text()
    assert len(text) < 10 << 20
    # A rank of another layout, of half as many ranks, finds what it has to read.
    start_s = time.process_time()
    found_by = Owners(Manifest.from_text(text.encode(), "here").tensors)
    now = Layout((("fsdp", 512),), (("fsdp", 0),))
    found = [
        piece
        for name, tensor in tensors.items()
        for piece in found_by.overlapping(name, now.box(tensor.shape, {"fsdp": 300}) if tensor.shape else whole(()))
    ]
    assert time.process_time() - start_s < 2
    if owners.MIN_STRETCH_BYTES > 1:
        assert len({piece.rank for piece in found}) < 64


class Alike(Ranks):
    """Ranks that all say the same."""

    def gather(self, value: T) -> list[T]:
        return [value] * self.size


def test_a_rank_of_1024_plans_a_save_of_1000_tensors_on_a_3d_mesh_in_time() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=777, world_size=1024)
    try:
        mesh = DeviceMesh("cpu", torch.arange(1024).view(4, 64, 4), mesh_dim_names=("dp_replicate", "fsdp", "tp"))
        # As fully_shard places what tensor parallelism has cut along the same dim.
        placements = (Replicate(), _StridedShard(0, split_factor=4), Shard(0))
        tensors = {
            f"model.{number}": DTensor.from_local(
                torch.empty(16, 64), mesh, placements, run_check=False, shape=torch.Size((4096, 64)), stride=(64, 1)
            )
            for number in range(1000)
        }
        header = Header(step=1, num_tokens=1, world_size=1024)
        flat = FlatState(tensors=tensors, per_rank={"rng.cpu": torch.get_rng_state()}, header=header)
        start_s = time.process_time()
        plan = save_plan.plan(flat, Alike())
        assert time.process_time() - start_s < 2
    finally:
        dist.destroy_process_group()
    axes = (("dp_replicate", 4), ("fsdp", 64), ("tp", 4))
    assert plan.tensors["model.0"].layout == Layout(axes, (("tp", 0), ("fsdp", 0)))
    # One replica in four writes each tensor, but for those that a cut falls into.
    assert 250 <= len(plan.parts) <= 253


def test_the_cost_of_a_plan_grows_with_tensors_but_not_with_ranks() -> None:
    def seconds(ranks: int) -> float:
        tensors = llama((("dp_replicate", 2), ("fsdp", ranks // 2)), num_layers=8)
        times = []
        for _ in range(3):
            start_s = time.process_time()
            Owners(tensors).of_rank(1)
            times.append(time.process_time() - start_s)
        return min(times)

    assert seconds(1 << 16) < 3 * seconds(16) + 0.01


def test_a_tensor_of_one_pipeline_stage_lies_on_its_ranks() -> None:
    layout = Layout((("ranks", 4), ("tp", 2)), (("tp", 0),))
    assert part_of_job(layout, list(range(8))) == layout
    mesh = (("stage", 2), ("ranks", 2), ("tp", 2))
    assert part_of_job(layout, [4, 5, 6, 7]) == Layout(mesh, layout.splits, (("stage", 1),))
    assert part_of_job(layout, [6, 7]) == Layout((("stage", 4), ("tp", 2)), layout.splits, (("stage", 3),))
    # Held by the first and the last stage, like a tied embedding: the first writes it.
    assert part_of_job(layout, [0, 1, 6, 7]) == Layout((("stage", 4), ("tp", 2)), layout.splits, (("stage", 0),))
    with pytest.raises(ValueError, match=r"on the ranks \[1, 2\] alone does not lie on a block"):
        part_of_job(layout, [1, 2])
