"""Every view of a mesh holds the ranks that its axes span, without a second group for the same ranks."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel import Mesh, ParallelConfig, build_mesh
from parallel.mesh import EXPERT_VIEWS, VIEWS
from tests.ranks import run_ranks

Groups = dict[str, list[list[int]]]


def alike(views: str, groups: list[list[int]]) -> Groups:
    """The same groups for several views."""
    return dict.fromkeys(views.split(), groups)


NAMES = (*VIEWS, *EXPERT_VIEWS)
SINGLE = [[rank] for rank in range(8)]
EVERYONE = [list(range(8))]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]

# Layouts of 8 ranks, and the global ranks of each group of each view.
MESHES: dict[str, tuple[dict[str, Any], Groups]] = {
    "full_shard 8": (
        {},
        {
            **alike("pp dp_replicate cp tp ep", SINGLE),
            **alike("fsdp dp_shard dp loss expert_fsdp", EVERYONE),
        },
    ),
    "hybrid_shard 2 x 2 x tp 2": (
        {"strategy": "hybrid_shard", "dp_replicate": 2, "tp": 2},
        {
            **alike("pp cp ep", SINGLE),
            "tp": PAIRS,
            **alike("fsdp dp_shard expert_fsdp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
            "dp_replicate": [[0, 4], [1, 5], [2, 6], [3, 7]],
            **alike("dp loss", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        },
    ),
    "dp_shard 2 x cp 2 x tp 2": (
        {"dp_shard": 2, "cp": 2, "cp_method": "ring", "tp": 2},
        {
            **alike("pp dp_replicate ep", SINGLE),
            "tp": PAIRS,
            "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            **alike("dp_shard dp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
            **alike("fsdp loss expert_fsdp", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        },
    ),
    "dp_shard 4 x cp 2, ep 4": (
        {"dp_shard": 4, "cp": 2, "cp_method": "ring", "ep": 4},
        {
            **alike("pp dp_replicate tp", SINGLE),
            "cp": PAIRS,
            **alike("dp_shard dp", [[0, 2, 4, 6], [1, 3, 5, 7]]),
            **alike("fsdp loss", EVERYONE),
            # Neighbours along fsdp share the experts.
            "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "expert_fsdp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        },
    ),
    "dp_shard 4 x tp 2, ep 2": (
        {"dp_shard": 4, "tp": 2, "ep": 2},
        {
            **alike("pp dp_replicate cp", SINGLE),
            "tp": PAIRS,
            **alike("fsdp dp_shard dp loss", [[0, 2, 4, 6], [1, 3, 5, 7]]),
            "ep": [[0, 2], [4, 6], [1, 3], [5, 7]],
            "expert_fsdp": [[0, 4], [2, 6], [1, 5], [3, 7]],
        },
    ),
    "pp 2 x dp_replicate 2 x cp 2": (
        {"pp": 2, "schedule": "1f1b", "dp_replicate": 2, "dp_shard": 1, "cp": 2, "cp_method": "ring"}
        | {"strategy": "hybrid_shard"},
        {
            **alike("dp_shard tp ep", SINGLE),
            "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            **alike("dp_replicate dp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
            **alike("cp fsdp expert_fsdp", PAIRS),
            "loss": [[0, 1, 2, 3], [4, 5, 6, 7]],
        },
    ),
}


def fake_mesh(rank: int, fields: dict[str, Any], ranks_per_node: int = 8) -> Mesh:
    """The mesh of 8 ranks as one of them sees it, in a process of its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    config = ParallelConfig(**fields)
    if config.dp_shard == -1:
        config = ParallelConfig(**fields, dp_shard=8 // (config.pp * config.dp_replicate * config.cp * config.tp))
    return Mesh(config, torch.device("cpu"), ranks_per_node)


def views_of_every_rank(fields: dict[str, Any]) -> list[dict[str, tuple[list[int], list[int], int, int]]]:
    """For each rank and view: ranks as stated, ranks of the process group, degree and coordinate."""
    seen = []
    for rank in range(8):
        mesh = fake_mesh(rank, fields)
        assert mesh.size == 8
        seen.append(
            {
                view: (
                    mesh.ranks(view),
                    dist.get_process_group_ranks(mesh.group(view)),
                    mesh.degree(view),
                    mesh.coordinate(view),
                )
                for view in NAMES
            }
        )
        assert all(mesh[view].get_local_rank() == mesh.coordinate(view) for view in NAMES)
    return seen


@pytest.mark.parametrize("name", MESHES)
def test_each_rank_finds_the_written_ranks_in_each_view(name: str) -> None:
    fields, groups = MESHES[name]
    (seen,) = run_ranks(1, views_of_every_rank, fields)
    assert groups.keys() == set(NAMES)
    for rank, views in enumerate(seen):
        for view, (stated, in_group, degree, coordinate) in views.items():
            expected = next(group for group in groups[view] if rank in group)
            assert stated == in_group == expected, (rank, view)
            assert (degree, coordinate) == (len(expected), expected.index(rank))


def test_views_of_the_same_ranks_share_one_group_and_others_do_not() -> None:
    shared, others, groups = run_ranks(1, twins)[0]
    assert shared == [["dp", "loss"], ["dp_shard", "expert_fsdp", "fsdp"]]
    assert len(others) == len(set(others))
    # One group a view of more than one rank, besides the world's: tp, fsdp, dp_replicate and dp.
    assert len(groups) == 4


def twins() -> tuple[list[list[str]], list[int], set[str]]:
    mesh = fake_mesh(0, MESHES["hybrid_shard 2 x 2 x tp 2"][0])
    wide = [view for view in NAMES if mesh.degree(view) > 1]
    names = {view: mesh.group(view).group_name for view in wide}
    shared = [sorted(view for view in wide if names[view] == name) for name in set(names.values())]
    distinct = [id(mesh[view]) for view in ("tp", "fsdp", "dp_replicate", "dp")]
    return sorted(each for each in shared if len(each) > 1), distinct, set(names.values())


def test_parameters_of_experts_lie_on_the_groups_of_the_other_ones() -> None:
    names, shape, groups, without = run_ranks(1, expert_mesh)[0]
    assert (names, shape) == (("pp", "dp_replicate", "expert_fsdp", "ep", "tp"), (1, 1, 2, 2, 2))
    assert groups["experts"] == groups["views"] and not without


def expert_mesh() -> tuple[Any, ...]:
    mesh = fake_mesh(5, MESHES["dp_shard 4 x tp 2, ep 2"][0])
    assert mesh.experts is not None
    names = mesh.experts.mesh_dim_names or ()
    groups = {
        "experts": {name: mesh.experts[name].get_group().group_name for name in names},
        "views": {name: mesh.group(name).group_name for name in names},
    }
    shape = tuple(mesh.experts.shape)
    return names, shape, groups, fake_mesh(5, {}).experts is not None


def test_ranks_are_named_by_the_view_they_make_up() -> None:
    assert run_ranks(1, names_of_ranks)[0] == ["tp", "fsdp", "dp_replicate", "dp", "world", "other", "fsdp"]


def names_of_ranks() -> list[str]:
    mesh = fake_mesh(5, MESHES["hybrid_shard 2 x 2 x tp 2"][0])
    groups = ([4, 5], [7, 5], [1, 5], [1, 3, 5, 7], list(range(8)), [0, 5])
    return [mesh.view_of(ranks) for ranks in groups] + [fake_mesh(5, {}).view_of(list(range(8)))]


def test_a_view_crosses_nodes_where_a_group_of_it_has_ranks_of_two() -> None:
    by_node_size = run_ranks(1, crossing_views)[0]
    assert by_node_size == {
        8: [],
        4: ["dp_replicate", "dp", "loss"],
        2: ["dp_replicate", "fsdp", "dp_shard", "dp", "loss"],
        1: ["dp_replicate", "fsdp", "tp", "dp_shard", "dp", "loss"],
    }


def crossing_views() -> dict[int, list[str]]:
    fields = MESHES["hybrid_shard 2 x 2 x tp 2"][0]
    meshes = {ranks_per_node: fake_mesh(0, fields, ranks_per_node) for ranks_per_node in (8, 4, 2, 1)}
    return {size: [view for view in VIEWS if mesh.crosses_nodes(view)] for size, mesh in meshes.items()}


def test_an_unknown_view_is_refused_with_the_legal_ones() -> None:
    for message in run_ranks(1, unknown_view)[0]:
        assert "no view 'ddp'; legal: pp, dp_replicate, fsdp, tp, dp_shard, cp, dp, loss, expert_fsdp, ep" in message


def unknown_view() -> list[str]:
    mesh, messages = build_mesh(ParallelConfig(data_parallel="none")), []
    for ask in (mesh.__getitem__, mesh.group, mesh.degree, mesh.ranks, mesh.coordinate, mesh.all_groups):
        with pytest.raises(KeyError) as caught:
            ask("ddp")
        messages.append(str(caught.value))
    return messages


def test_tensor_parallelism_across_nodes_is_warned_of() -> None:
    for one_node, two_nodes in run_ranks(2, warnings_by_node_size):
        assert one_node == []
        assert two_nodes == ["tp=2 crosses nodes of 1 ranks; its traffic is per layer and will be slow"]


def warnings_by_node_size() -> list[list[str]]:
    found = []
    for ranks_per_node in ("2", "1"):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setenv("LOCAL_WORLD_SIZE", ranks_per_node)
            build_mesh(ParallelConfig(tp=2))
        found.append([str(each.message) for each in caught])
    return found


def test_a_layout_is_described_in_a_few_words() -> None:
    assert run_ranks(1, descriptions)[0] == [
        "fsdp2 hybrid_shard, dp_replicate 2 x dp_shard 2 x tp 2",
        "fsdp2 full_shard, dp_shard 8",
        "none, 1 rank",
    ]


def descriptions() -> list[str]:
    meshes = [fake_mesh(0, MESHES["hybrid_shard 2 x 2 x tp 2"][0]), fake_mesh(0, {})]
    dist.destroy_process_group()
    meshes.append(build_mesh(ParallelConfig(data_parallel="none")))
    return [mesh.describe() for mesh in meshes]


def test_a_world_that_does_not_fit_is_refused_before_a_group_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="6 ranks are not a multiple"):
        build_mesh(ParallelConfig(tp=4))
    assert not dist.is_initialized()


def test_a_world_size_without_a_rank_names_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="WORLD_SIZE=2 is set but RANK is not; start the script through torchrun"):
        build_mesh(ParallelConfig())
    assert not dist.is_initialized()
