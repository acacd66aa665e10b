"""What each data-parallel backend can do, as data; the only list of them beside the table of `parallelize`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a backend can do.

    Attributes:
        shards: Whether it shards parameters, so that strategies and units have a meaning.
        one_process: Whether it runs one process only.
        has_buckets: Whether it sends gradients in buckets.
        sums_each_micro_batch: Whether it may sum gradients over ranks after every micro-batch.
        splits_optimizer_rows: Whether each rank updates its rows of every parameter and then sends them to the others.
        gathers_centrally: Whether one device gathers all gradients and sends parameters back, without collectives.
        flattens: Whether it concatenates the parameters of a unit and cuts them anywhere.
        refused_axes: Axes that it does not compose with, each with what to use instead.
        refused_sharding: Fields of `Sharding` that it has no use for, each with what to use instead.
        most_prefetch: How many units ahead of its use it can gather one; None: any number.
    """

    shards: bool = False
    one_process: bool = False
    has_buckets: bool = False
    sums_each_micro_batch: bool = True
    splits_optimizer_rows: bool = False
    gathers_centrally: bool = False
    flattens: bool = False
    refused_axes: Mapping[str, str] = field(default_factory=dict)
    refused_sharding: Mapping[str, str] = field(default_factory=dict)
    most_prefetch: int | None = None


_ROW_SHARDS = "data_parallel='fsdp2' with strategy='shard_grad_op', which shards optimizer state too"

TRAITS: Mapping[str, Traits] = {
    "none": Traits(one_process=True),
    "dp": Traits(one_process=True, gathers_centrally=True),
    "ddp": Traits(has_buckets=True, sums_each_micro_batch=False, refused_axes={"ep": "data_parallel='fsdp2'"}),
    "zero1": Traits(
        has_buckets=True,
        sums_each_micro_batch=False,
        splits_optimizer_rows=True,
        refused_axes=dict.fromkeys(("pp", "tp", "ep"), _ROW_SHARDS),
    ),
    "fsdp1": Traits(
        shards=True,
        flattens=True,
        refused_axes=dict.fromkeys(("pp", "cp", "ep"), "data_parallel='fsdp2'"),
        refused_sharding=dict.fromkeys(("reshard_group", "find_unused_parameters"), "data_parallel='fsdp2'"),
        most_prefetch=1,
    ),
    "fsdp2": Traits(shards=True, refused_sharding={"limit_all_gathers": "data_parallel='fsdp1'"}),
}
