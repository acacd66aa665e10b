"""Shows how far predictions are from published results."""

import json
from collections.abc import Sequence
from typing import Any

from recipes.plan.fit import without_source
from recipes.plan.published import Errors, Row, errors, read_rows, summary


def show_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    """Prints the errors of rows; of those that constants are fitted on also with their source left out of the fit.

    Args:
        rows: Published results.
        as_json: For programs.
    """
    found = [errors(row) for row in rows]
    is_fitted = list(rows) == read_rows()
    left_out = [each for source in _sources(rows) for each in without_source(rows, source)] if is_fitted else []
    if as_json:
        values = {"rows": [_values(each) for each in found], **_totals(found)}
        if left_out:
            values["left_out"] = {"rows": [_values(each) for each in left_out], **_totals(left_out)}
        print(json.dumps(values, indent=1))
        return
    _print("predicted with the constants that come with the package", found)
    if left_out:
        _print("each source predicted with constants that were fitted on the others", left_out)


def _sources(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.source for row in rows))


def _print(title: str, found: Sequence[Errors]) -> None:
    print(f"{title}:")
    print("  tokens/s a GPU: said, predicted, error    GiB: said, predicted, error    row")
    for each in found:
        speed = f"{each.row.tokens_per_s:8.0f} {each.tokens_per_s:8.0f} {each.speed_error:+7.1%}"
        memory = ""
        if each.memory_error is not None:
            memory = f"{each.row.memory_gib:6.1f} {each.memory_gib:6.1f} {each.memory_error:+7.1%}"
        doubts = f" (unvalidated: {', '.join(each.unvalidated)})" if each.unvalidated else ""
        print(f"  {speed}    {memory:22}  {each.row.source}: {each.row.name}{doubts}")
    median, worst, of_memory, worst_memory = summary(found)
    words = f"  speed: median {median:.1%}, worst {worst:.1%}"
    if of_memory is not None:
        words += f"; memory: median {of_memory:.1%}, worst {worst_memory:.1%}"
    print(words)


def _values(each: Errors) -> dict[str, Any]:
    return {
        "source": each.row.source,
        "row": each.row.name,
        "tokens_per_s_per_gpu": each.tokens_per_s,
        "speed_error": each.speed_error,
        "memory_gib": each.memory_gib,
        "memory_error": each.memory_error,
        "unvalidated": each.unvalidated,
    }


def _totals(found: Sequence[Errors]) -> dict[str, Any]:
    names = ("median_speed_error", "worst_speed_error", "median_memory_error", "worst_memory_error")
    return dict(zip(names, summary(found), strict=True))
