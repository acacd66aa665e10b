"""Lists what a rank of a pipeline does in a step, in order."""

from typing import Literal, NamedTuple

from parallel.config import ParallelConfig


class Action(NamedTuple):
    """One micro-batch's way through one stage.

    Attributes:
        kind: Which way.
        lap: Which of the rank's stages, from 0.
        micro_batch: Its number.
    """

    kind: Literal["forward", "backward"]
    lap: int
    micro_batch: int


def actions_of(config: ParallelConfig, pp_rank: int, num_micro_batches: int) -> list[Action]:
    """What one rank does under a schedule with one stage a rank.

    Args:
        config: The layout.
        pp_rank: The rank's place along `pp`.
        num_micro_batches: Micro-batches of a step.
    """
    count = num_micro_batches
    forward = [Action("forward", 0, each) for each in range(count)]
    backward = [Action("backward", 0, each) for each in range(count)]
    if config.schedule == "gpipe":
        return [*forward, *backward]
    # As many forwards as stages follow, then one backward for each forward.
    warm = min(count, config.pp - pp_rank)
    steady = [each for pair in zip(backward, forward[warm:], strict=False) for each in pair]
    return [*forward[:warm], *steady, *backward[count - warm :]]
