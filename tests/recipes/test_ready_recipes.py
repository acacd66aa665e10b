"""Every ready recipe builds at its full world size, and each rank holds the share that its layout says."""

import os
from math import ceil

import numpy as np
import pytest
import torch.distributed as dist

from models.registry import family_of
from parallel.layout import resolve
from parallel.stages import cut
from recipes.dry_run import DryRun, dry_run
from recipes.find import find_recipe, intended_world_size, recipe_names
from recipes.recipe import Recipe
from tests.ranks import run_ranks

READY = [name for name in recipe_names() if intended_world_size(name) is not None]
FLOAT32 = 4
Part = tuple[int, int, int | None]
"""Rows, columns, and the dim that tensor parallelism splits."""


def _dry_run(name: str, world_size: int, rank: int) -> DryRun:
    """In a process of the pool, so that nothing of the fake group stays in this one."""
    dist.destroy_process_group()
    before = dict(os.environ)
    made = dry_run(find_recipe(name), world_size, rank)
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    return made


def _parts(recipe: Recipe) -> dict[str, Part]:
    """Of each parameter: rows, columns, and the dim that tensor parallelism splits; norms it leaves whole."""
    shape = recipe.model.shape
    d, f, v = shape.width, shape.feed_forward_width, shape.vocab_size
    heads, groups = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    parts: dict[str, Part] = {"embed.weight": (v, d, 0), "norm.weight": (d, 1, None)}
    if not shape.tied_embeddings:
        parts["head.weight"] = (v, d, 0)
    for index in range(shape.num_layers):
        parts |= {
            f"blocks.{index}.{name}.weight": part
            for name, part in {
                "attention_norm": (d, 1, None),
                "attention.q_proj": (heads, d, 0),
                "attention.k_proj": (groups, d, 0),
                "attention.v_proj": (groups, d, 0),
                "attention.o_proj": (d, heads, 1),
                "feed_forward_norm": (d, 1, None),
                "feed_forward.gate_proj": (f, d, 0),
                "feed_forward.up_proj": (f, d, 0),
                "feed_forward.down_proj": (d, f, 1),
            }.items()
        }
    return parts


def _bytes_of(part: Part, tp: int, shards: int, place: int) -> int:
    """Tensor parallelism splits first; of the rows that are left each rank of the shards takes the same, rounded up."""
    rows, columns, split = part
    rows, columns = (rows // tp if split == 0 else rows), (columns // tp if split == 1 else columns)
    size = ceil(rows / shards)
    return max(0, min(size, rows - place * size)) * columns * FLOAT32


def _of_stages(parts: dict[str, Part], recipe: Recipe, rank: int) -> dict[str, Part]:
    """Those that a rank of a pipeline holds."""
    pp = recipe.parallel.pp
    if pp == 1:
        return parts
    stages = cut(family_of(recipe.model).plan(recipe.model), recipe.parallel)
    own = [fqn for stage in stages if stage.rank == rank for fqn in stage.modules]
    # Ranks hold about as many modules; embedding, norm and head count.
    assert len(own) == pytest.approx((recipe.model.shape.num_layers + 3) / pp, abs=2)
    starts = tuple(f"{each}." for each in own)
    return {fqn: part for fqn, part in parts.items() if fqn.startswith(starts)}


def test_the_recipes_for_clusters_are_listed_with_their_world_sizes() -> None:
    assert {name: intended_world_size(name) for name in recipe_names()} == {
        "llama_debug": None,
        "moe_debug": None,
        "moe_qwen3_30b_a3b": 64,
        "smollm2_135m": 8,
        "llama_3_2_1b": 8,
        "llama_3_1_8b": 64,
        "llama_3_1_8b_128k": 64,
        "llama_3_1_70b": 256,
        "llama_3_1_70b_3d": 256,
        "llama_3_1_405b": 2048,
        "llama_3_1_405b_4d": 8192,
    }


# Ranks from both ends, which uneven shards tell apart, and an arbitrary one.
@pytest.mark.parametrize(
    ("name", "world_size", "rank", "mesh"),
    [
        ("smollm2_135m", 8, 7, "no_shard, dp_replicate 8"),
        ("llama_3_2_1b", 8, 0, "shard_grad_op, dp_shard 8"),
        ("llama_3_1_8b", 8, 5, "full_shard, dp_shard 8"),
        ("llama_3_1_8b", 64, 63, "full_shard, dp_shard 64"),
        ("llama_3_1_70b", 256, 83, "full_shard, dp_shard 32 x tp 8"),
        ("llama_3_1_8b_128k", 64, 37, "full_shard, dp_shard 4 x cp 8 x tp 2"),
        ("llama_3_1_70b_3d", 256, 3, "full_shard, pp 4 x dp_shard 8 x tp 8"),
        ("llama_3_1_70b_3d", 256, 255, "full_shard, pp 4 x dp_shard 8 x tp 8"),
        ("llama_3_1_405b_4d", 8192, 5001, "full_shard, pp 16 x dp_shard 4 x cp 16 x tp 8"),
        ("llama_3_1_405b", 2048, 0, "hybrid_shard, dp_replicate 2 x dp_shard 128 x tp 8"),
        ("llama_3_1_405b", 2048, 2047, "hybrid_shard, dp_replicate 2 x dp_shard 128 x tp 8"),
    ],
)
def test_a_rank_of_the_full_world_holds_its_share_to_the_byte(name: str, world_size: int, rank: int, mesh: str) -> None:
    recipe = find_recipe(name)
    layout = resolve(recipe.parallel, world_size)
    (made,) = run_ranks(1, _dry_run, name, world_size, rank)
    assert made.mesh == f"fsdp2 {mesh}"
    sizes = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    place = dict(zip(sizes, map(int, np.unravel_index(rank, list(sizes.values()))), strict=True))
    assert made.coordinates == place
    shards, own = layout.dp_shard * layout.cp, place["dp_shard"] * layout.cp + place["cp"]
    parts = _of_stages(_parts(recipe), recipe, place["pp"])
    expected = {fqn: _bytes_of(part, layout.tp, shards, own) for fqn, part in parts.items()}
    assert {fqn: shard.num_bytes for fqn, shard in made.shards.items()} == expected
    assert made.parameter_bytes == sum(expected.values())
    # What is not split by rows that divide is little, and so is what stages differ by.
    share = recipe.model.num_parameters * FLOAT32 / (layout.pp * layout.tp * shards)
    if layout.pp == 1:
        assert made.num_parameters == recipe.model.num_parameters
    assert made.parameter_bytes == pytest.approx(share, rel=0.02 if layout.pp == 1 else 0.2)


@pytest.mark.parametrize("name", READY)
def test_a_ready_recipe_divides_its_global_batch_and_computes_in_bfloat16(name: str) -> None:
    recipe = find_recipe(name)
    world_size = intended_world_size(name)
    assert world_size
    assert recipe.name == name
    layout = resolve(recipe.parallel, world_size)
    ranks = layout.dp_replicate * layout.dp_shard
    assert recipe.training.global_batch % (ranks * recipe.training.micro_batch) == 0
    assert (layout.precision.compute, layout.precision.reduce) == ("bfloat16", "float32")
    assert recipe.data.sequence_length <= recipe.model.max_sequence_length  # type: ignore[attr-defined]


def test_a_rank_of_the_full_world_holds_its_share_of_the_experts_to_the_byte() -> None:
    name, world_size, rank = "moe_qwen3_30b_a3b", 64, 43
    recipe = find_recipe(name)
    (made,) = run_ranks(1, _dry_run, name, world_size, rank)
    assert made.mesh == "fsdp2 full_shard, dp_shard 64 x ep 8"
    assert made.num_parameters == recipe.model.num_parameters == 30_532_122_624
    shape = recipe.model.shape
    assert shape.expert_width
    experts = {fqn: shard for fqn, shard in made.shards.items() if ".experts." in fqn}
    assert len(experts) == 3 * shape.num_layers
    # 8 ranks have 16 of 128 experts each, and 8 ranks that have the same ones hold two of them each.
    assert {shard.local_shape[0] for shard in experts.values()} == {2}
    assert {shard.num_bytes for shard in experts.values()} == {2 * shape.width * shape.expert_width * FLOAT32}
    whole = {fqn: shard for fqn, shard in made.shards.items() if fqn not in experts}
    assert {(ceil(shard.shape[0] / 64), *shard.shape[1:]) for shard in whole.values()} == {
        shard.local_shape for shard in whole.values()
    }


def _refusals() -> list[str]:
    with pytest.raises(ValueError) as in_a_job:
        dry_run(find_recipe("llama_debug"), 2)
    dist.destroy_process_group()
    refusals = [str(in_a_job.value)]
    debug = find_recipe("llama_debug")
    for recipe, world_size, rank in ((find_recipe("llama_3_1_70b"), 12, 0), (debug, 4, 4)):
        with pytest.raises(ValueError) as refusal:
            dry_run(recipe, world_size, rank)
        refusals.append(str(refusal.value))
        assert not dist.is_initialized()
    return refusals


def test_what_cannot_be_built_is_refused_and_leaves_no_group() -> None:
    (refusals,) = run_ranks(1, _refusals)
    in_a_job, world_size, rank = refusals
    assert "this process has one" in in_a_job
    assert "12 ranks are not a multiple of" in world_size
    assert "rank=4 must be from 0 to 3" in rank
