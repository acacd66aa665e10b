"""Chooses few rows that hold every pair of choices together."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, product

Row = tuple[str, ...]
Pair = tuple[tuple[int, str], tuple[int, str]]


def pairs(row: Row) -> set[Pair]:
    """Every two choices of a row, each with the number of its factor."""
    return set(combinations(enumerate(row), 2))


def all_pairs(factors: Sequence[Sequence[str]], is_meaningful: Callable[[Row], bool]) -> set[Pair]:
    """Every pair that some meaningful row holds."""
    return _pairs_of_any(list(filter(is_meaningful, product(*factors))))


def covering_rows(
    factors: Sequence[Sequence[str]], is_meaningful: Callable[[Row], bool], costly: Sequence[int] = (), seed: int = 0
) -> list[Row]:
    """Rows that hold every possible pair, chosen greedily; the same ones on every machine.

    Args:
        factors: The choices of each factor.
        is_meaningful: Whether a row can be taken.
        costly: Numbers of the factors whose first choice runs fastest, so that others are kept only for their pairs.
        seed: Of the draw.

    Returns:
        The rows, in the order of the choices.
    """
    possible = list(filter(is_meaningful, product(*factors)))
    left = _pairs_of_any(possible)
    draw = random.Random(seed)
    rows: list[Row] = []
    while left:
        # A sample is enough to find a good row, until few pairs are left.
        candidates = draw.sample(possible, min(200, len(possible)))
        best = max(candidates, key=lambda row: len(pairs(row) & left))
        if not pairs(best) & left:
            best = max(possible, key=lambda row: len(pairs(row) & left))
        rows.append(best)
        left -= pairs(best)
    rows = _with_first_choices(rows, [(number, factors[number][0]) for number in costly], is_meaningful)
    return sorted(rows, key=lambda row: [list(names).index(name) for names, name in zip(factors, row, strict=True)])


def _with_first_choices(
    rows: Sequence[Row], firsts: Sequence[tuple[int, str]], is_meaningful: Callable[[Row], bool]
) -> list[Row]:
    """Takes the first choice of a factor wherever other rows hold all pairs of the row's own choice."""
    held = Counter(pair for row in rows for pair in pairs(row))
    changed = []
    for row in rows:
        for number, first in firsts:
            other = (*row[:number], first, *row[number + 1 :])
            if is_meaningful(other) and all(held[pair] > 1 for pair in pairs(row) - pairs(other)):
                held.subtract(pairs(row) - pairs(other))
                held.update(pairs(other) - pairs(row))
                row = other
        changed.append(row)
    # Two rows may have become one.
    return list(dict.fromkeys(changed))


def _pairs_of_any(rows: Sequence[Row]) -> set[Pair]:
    # Factor by factor: a set of pairs for each row would take seconds.
    columns = enumerate(zip(*rows, strict=True))
    return {
        ((one, choice), (other, with_choice))
        for (one, choices), (other, with_choices) in combinations(columns, 2)
        for choice, with_choice in set(zip(choices, with_choices, strict=True))
    }
