"""What each pipeline schedule asks for, and which rank runs which stage under it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.plan import ModelShape
from parallel.schedule_file import ScheduleFile, read_schedule

if TYPE_CHECKING:
    from parallel.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """What a schedule asks for.

    Attributes:
        torch_name: Its name in `torch.distributed.pipelining`; None: it stands in a file.
        fewest: Fewest stages of a rank.
        most: Most stages of a rank; None: any number.
        is_v: Whether ranks take their second stages in reverse order, so that the first rank has the last stage.
        in_rounds: Whether micro-batches come in rounds of as many each, about `pp` of them.
        fills_stages: Whether there must be a micro-batch for each stage and not only for each rank.
        splits_backward: Whether gradients of weights are computed apart from those of inputs.
    """

    torch_name: str | None
    fewest: int = 1
    most: int | None = 1
    is_v: bool = False
    in_rounds: bool = False
    fills_stages: bool = False
    splits_backward: bool = False


SCHEDULES = {
    "gpipe": ScheduleTraits(torch_name="GPipe"),
    "1f1b": ScheduleTraits(torch_name="1F1B"),
    "interleaved_1f1b": ScheduleTraits(torch_name="Interleaved1F1B", fewest=2, most=None, in_rounds=True),
    "interleaved_zero_bubble": ScheduleTraits(
        torch_name="InterleavedZeroBubble", fewest=2, most=None, in_rounds=True, splits_backward=True
    ),
    "zbv_zero_bubble": ScheduleTraits(torch_name="ZBVZeroBubble", fewest=2, most=2, is_v=True, splits_backward=True),
    "dual_pipe_v": ScheduleTraits(
        torch_name="DualPipeV", fewest=2, most=2, is_v=True, fills_stages=True, splits_backward=True
    ),
}
"""By the name that a config gives; beside them stands `FROM_FILE`."""
FROM_FILE = "csv"
LEGAL_SCHEDULES = ", ".join((*SCHEDULES, FROM_FILE))


def traits_of(config: "ParallelConfig") -> ScheduleTraits:
    """What the schedule of a config asks for.

    Args:
        config: The layout.

    Raises:
        ValueError: If the schedule is in a file that cannot be run.
    """
    table = _table(config)
    if table is not None:
        return ScheduleTraits(torch_name=None, most=None, splits_backward=table.splits_backward)
    return SCHEDULES[config.schedule or "1f1b"]


def _table(config: "ParallelConfig") -> ScheduleFile | None:
    """What the file of a config says; None: its schedule is one of torch's."""
    return read_schedule(config.schedule_file or "") if config.schedule == FROM_FILE else None


def num_stages(config: "ParallelConfig") -> int:
    """Stages of the whole pipeline.

    Args:
        config: The layout.
    """
    table = _table(config)
    if table is not None:
        return len(table.ranks)
    return len(config.stages) if config.stages else config.pp * traits_of(config).fewest


def stage_ranks(config: "ParallelConfig") -> tuple[int, ...]:
    """The rank of each stage.

    Args:
        config: The layout.
    """
    table = _table(config)
    if table is not None:
        return table.ranks
    return placement(num_stages(config), config.pp, is_v=traits_of(config).is_v)


def check_stages(config: "ParallelConfig", shape: ModelShape) -> None:
    """Holds schedule and stages against the number of layers.

    Args:
        config: The layout.
        shape: The model's counts and widths.

    Raises:
        ValueError: If they do not fit each other.
    """
    traits, count, layers = traits_of(config), num_stages(config), shape.num_layers
    table = _table(config)
    if table is not None:
        _check_table(config, table.ranks)
    elif count % config.pp or count < traits.fewest * config.pp or (traits.most and count > traits.most * config.pp):
        of_rank = f"{traits.fewest}" if traits.most == traits.fewest else f"at least {traits.fewest}"
        raise ValueError(
            f"schedule={config.schedule!r} runs {of_rank} stages on each of pp={config.pp} ranks, but stages="
            f"{config.stages} are {count}; legal: a multiple of {config.pp} from {traits.fewest * config.pp}"
            + (f" to {traits.most * config.pp}" if traits.most else "")
        )
    if layers < count:
        raise ValueError(
            f"schedule={config.schedule!r} on pp={config.pp} ranks needs at least {traits.fewest} virtual stages a "
            f"rank, {count} stages in all, each with a block or more; the model has {layers} blocks: pp can be at most "
            f"{layers // (count // config.pp)}"
        )
    if config.stages and sum(config.stages) != layers:
        raise ValueError(f"stages={config.stages} hold {sum(config.stages)} blocks, but the model has {layers}")


def _check_table(config: "ParallelConfig", ranks: Sequence[int]) -> None:
    """Holds a schedule in a file, by the rank of each stage, against the layout."""
    if 1 + max(ranks) != config.pp:
        raise ValueError(
            f"{config.schedule_file} has rows for {1 + max(ranks)} ranks, but pp={config.pp}; give it a row for "
            "each rank"
        )
    if config.stages and len(config.stages) != len(ranks):
        raise ValueError(
            f"stages={config.stages} are {len(config.stages)}, but {config.schedule_file} has {len(ranks)}; give as "
            "many, or leave stages out"
        )
    check_split_backward(config)


def check_split_backward(config: "ParallelConfig") -> None:
    """Holds a schedule that computes gradients of weights apart against what is done to blocks.

    Args:
        config: The layout.

    Raises:
        ValueError: If a block is to be compiled, or some of its ops computed again.
    """
    if not traits_of(config).splits_backward:
        return
    whole = ", ".join(name for name, traits in SCHEDULES.items() if not traits.splits_backward)
    # Gradients of weights are computed apart from those of inputs, by a second walk through a block's graph.
    for name, value, without in (
        ("compile", config.compile, False),
        ("activation_checkpointing", config.activation_checkpointing == "selective", "none"),
    ):
        if value:
            raise ValueError(
                f"schedule={config.schedule!r} goes backward through each block twice, which "
                f"{name}={getattr(config, name)!r} does not allow; use {whole}, or "
                f"{name}={without!r}"
            )


def check_micro_batches(config: "ParallelConfig", num_micro_batches: int) -> None:
    """Holds the number of micro-batches of a step against the schedule.

    Args:
        config: The layout.
        num_micro_batches: Micro-batches of a step on each rank.

    Raises:
        ValueError: If the schedule cannot run so many.
    """
    if config.pp == 1 or _runs(config, num_micro_batches):
        return
    table = _table(config)
    if table is not None:
        raise ValueError(
            f"a step has {num_micro_batches} micro-batches, but {config.schedule_file} is a schedule of "
            f"{table.num_micro_batches}; give the step as many"
        )
    legal = [n for n in range(1, num_micro_batches + 4 * num_stages(config)) if _runs(config, n)]
    nearest = sorted(sorted(legal, key=lambda n: abs(n - num_micro_batches))[:4])
    stages = f"pp={config.pp} stages" if num_stages(config) == config.pp else f"{num_stages(config)} stages"
    raise ValueError(
        f"schedule={config.schedule!r} cannot run {num_micro_batches} micro-batches for {stages} on {config.pp} ranks; "
        f"nearest legal numbers: {nearest}"
    )


def _runs(config: "ParallelConfig", num_micro_batches: int) -> bool:
    table = _table(config)
    if table is not None:
        return num_micro_batches == table.num_micro_batches
    traits = traits_of(config)
    if num_micro_batches < (num_stages(config) if traits.fills_stages else config.pp):
        return False
    return not traits.in_rounds or num_micro_batches % (num_micro_batches // config.pp) == 0


def placement(count: int, num_ranks: int, *, is_v: bool) -> tuple[int, ...]:
    """The rank of each stage.

    Args:
        count: Stages, a multiple of the ranks.
        num_ranks: Ranks.
        is_v: Whether every second round goes backwards.
    """
    rounds = (divmod(index, num_ranks) for index in range(count))
    return tuple(num_ranks - 1 - place if is_v and lap % 2 else place for lap, place in rounds)
