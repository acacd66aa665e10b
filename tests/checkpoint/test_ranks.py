"""What ranks ask each other before they go on together."""

import pytest
import torch.distributed as dist

from checkpoint.ranks import Ranks
from tests.ranks import run_ranks


def questions() -> tuple[bool, bool, list[str], list[dict[tuple[int, ...], int]]]:
    """Whether results are alike, alike and not; what was raised; and distinct values."""
    ranks, raised = Ranks(), list[str]()
    alike = ranks.alike("count", lambda: 7, str)
    other = ranks.alike("count", lambda: ranks.rank, str)
    assert (alike[0], other[0]) == (7, dist.get_rank())

    def action() -> int:
        if ranks.rank == 1:
            raise ValueError("one is wrong")
        return 3

    def digest(value: int) -> str:
        return str(1 / (value - ranks.rank))

    for ask in (lambda: ranks.together("act", action), lambda: ranks.alike("act", lambda: 1, digest)):
        try:
            ask()
        except (ValueError, RuntimeError) as error:
            raised.append(str(error))
    return alike[1], other[1], raised, [ranks.distinct(each, str(each)) for each in (5, ranks.rank)]


def test_ranks_agree_on_results_and_on_failures_of_any_of_them() -> None:
    for alike, other, raised, (one, two) in run_ranks(2, questions):
        assert alike and not other
        # Where the hash fails, all hear of it too.
        assert "one is wrong" in raised[0] and "ZeroDivisionError" in raised[1] and "rank 1" in raised[1]
        assert one == {(0, 1): 5} and two == {(0,): 0, (1,): 1}


def test_a_process_alone_asks_nobody() -> None:
    ranks = Ranks()
    assert ranks.alike("count", lambda: 7, str) == (7, True)
    with pytest.raises(ValueError, match="wrong"):
        ranks.together("act", lambda: int("wrong"))
