"""Lists what a rank of a pipeline does in a step, in order."""

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class

from parallel.config import ParallelConfig
from parallel.schedules import num_stages, stage_ranks, traits_of

Kind = Literal["gather", "forward", "backward", "inputs", "weights", "reduce", "free"]

_KINDS: dict[str, Kind] = {
    "UNSHARD": "gather",
    "F": "forward",
    "B": "backward",
    "I": "inputs",
    "W": "weights",
    "REDUCE_GRAD": "reduce",
    "RESHARD": "free",
}
"""By the names that torch gives actions; what it sends and receives is none of them."""


class Action(NamedTuple):
    """One micro-batch's way through one stage, or what is done to the stage's parameters.

    Attributes:
        kind: Which way: `backward` is both `inputs`, the gradient of what the stage was given, and `weights`.
        lap: Which of the rank's stages, from 0.
        micro_batch: Its number; 0 where a stage's parameters are gathered or freed, or their gradients summed.
    """

    kind: Kind
    lap: int
    micro_batch: int


def runs_listed(config: ParallelConfig) -> bool:
    """Whether torch runs a schedule from a list of actions, as it does all that may have several stages a rank.

    Args:
        config: The layout.
    """
    return config.schedule not in ("gpipe", "1f1b")


def actions_of(config: ParallelConfig, pp_rank: int, num_micro_batches: int) -> tuple[Action, ...]:
    """What one rank does under its schedule.

    Args:
        config: The layout.
        pp_rank: The rank's place along `pp`.
        num_micro_batches: Micro-batches of a step.
    """
    count = num_micro_batches
    if runs_listed(config):
        return tuple(_listed(config, pp_rank, count))
    forward = [Action("forward", 0, each) for each in range(count)]
    backward = [Action("backward", 0, each) for each in range(count)]
    if config.schedule == "gpipe":
        return (*forward, *backward)
    # As many forwards as stages follow, then one backward for each forward.
    warm = min(count, config.pp - pp_rank)
    steady = [each for pair in zip(backward, forward[warm:], strict=False) for each in pair]
    return (*forward[:warm], *steady, *backward[count - warm :])


def _listed(config: ParallelConfig, pp_rank: int, num_micro_batches: int) -> list[Action]:
    """What torch itself lists for stages that it is only told the numbers of."""
    own = [index for index, rank in enumerate(stage_ranks(config)) if rank == pp_rank]
    stages = [_numbered(config, index, pp_rank) for index in own]
    name = traits_of(config).torch_name
    # Private: what runs all of torch's schedules with several stages a rank; no public way takes a table.
    kind: Any = get_schedule_class(name) if name else _PipelineScheduleRuntime
    made = kind(stages, num_micro_batches, loss_fn=len, scale_grads=False)
    if name is None:
        made._load_csv(config.schedule_file or "")
    actions = []
    for action in made.pipeline_order_with_comms[pp_rank]:
        for each in action.sub_actions or (action,):
            kind = _KINDS.get(each.computation_type.value)
            if kind is not None:
                actions.append(Action(kind, own.index(each.stage_index), each.microbatch_index or 0))
    return actions


def _numbered(config: ParallelConfig, index: int, pp_rank: int) -> Any:
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages(config),
        group_size=config.pp,
        group_rank=pp_rank,
        is_first=index == 0,
        is_last=index == num_stages(config) - 1,
        submod=nn.Identity(),
    )
