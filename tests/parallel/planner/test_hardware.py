from pathlib import Path

import pytest

from parallel import ParallelConfig
from parallel.planner.constants import CONSTANTS
from parallel.planner.hardware import find_gpu, read_gpus
from parallel.planner.links import Link, link_of_view

OWN = """
[mine]
peak_tflops = {{ bfloat16 = 100.0 }}
memory_gib = {memory}
memory_gb_per_s = 1000.0
power_w = 300.0
gpus_per_node = 4
node_link_gb_per_s = 50.0
network_link_gb_per_s = 10.0
hop_latency_us = 4.0
"""
GPU = find_gpu("h100-80gb")
NODE, NETWORK = (link * CONSTANTS.link_share * 1e9 for link in (GPU.node_link_gb_per_s, GPU.network_link_gb_per_s))


def test_a_users_file_adds_to_the_table(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(OWN.format(memory=24.0))
    assert find_gpu("mine", str(path)).memory_bytes == 24 * 2**30
    assert set(read_gpus(str(path))) == {*read_gpus(), "mine"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.format(memory=-1.0), r"'mine': memory_gib=-1.0 must be a positive number"),
        (OWN.format(memory=24.0) + "color = 1\n", r"unknown fields \['color'\]"),
        ("[mine]\nmemory_gib = 24.0\n", r"missing fields \['gpus_per_node'"),
        ("[mine", "is no TOML"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_gpus(str(path))


def test_an_unknown_gpu_is_answered_with_those_that_are_known_and_their_bytes() -> None:
    expected = r"unknown GPU 'h100'; nearest: h100-80gb; legal: .*h100-80gb \(84932978278 bytes\)"
    with pytest.raises(ValueError, match=expected):
        find_gpu("h100")


@pytest.mark.parametrize(
    ("degrees", "view", "expected"),
    [
        ({"tp": 8, "dp_shard": 4}, "tp", NODE),
        ({"tp": 8, "dp_shard": 4}, "fsdp", NETWORK),
        ({"tp": 2, "dp_shard": 16}, "fsdp", 4 * NETWORK),
        ({"dp_shard": 32}, "fsdp", 8 * NETWORK),
    ],
)
def test_a_group_has_as_many_network_links_as_ranks_in_a_node(
    degrees: dict[str, int], view: str, expected: float
) -> None:
    link = link_of_view(ParallelConfig(**degrees), view, GPU, CONSTANTS)  # type: ignore[arg-type]
    assert link.bytes_per_s == expected


def test_what_goes_to_one_rank_or_all_at_once_crosses_a_link_between_nodes_alone() -> None:
    within, across = Link(8, 1, GPU, CONSTANTS), Link(16, 1, GPU, CONSTANTS)
    assert within.direct_bytes_per_s == NODE
    assert across.direct_bytes_per_s == NETWORK < across.bytes_per_s


def test_fields_of_the_host_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(OWN.format(memory=24.0) + "host_memory_gib = 64.0\n")
    assert find_gpu("mine", str(path)).host_memory_bytes == 64 * 2**30
    assert find_gpu("mine", str(path)).host_link_gb_per_s == 25.0


def test_latency_of_a_ring_grows_with_its_ranks() -> None:
    times = [Link(ranks, 1, GPU, CONSTANTS).time_s("all_gather", 0.0) for ranks in (16, 512)]
    assert times == pytest.approx([15 * 4e-6, 511 * 4e-6])


def test_float16_has_bfloat16s_peak_and_float8_twice_that_where_there_is_some() -> None:
    for name, gpu in read_gpus().items():
        assert gpu.peak("float16") == gpu.peak("bfloat16")
        if name.startswith("a100"):
            with pytest.raises(ValueError, match=r"'a100-.*' has no peak_tflops for float8; legal: bfloat16, float16"):
                gpu.peak("float8")
        else:
            assert gpu.peak("float8") == pytest.approx(2 * gpu.peak("bfloat16"), rel=1e-3)
