"""The command `python -m recipes.ring`."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from recipes.checks import check_integer
from recipes.command import parse
from recipes.launch import run
from recipes.launchers import is_first_rank, world_size_to_come
from recipes.messages import one_message
from recipes.ring.measure import Row, measure
from recipes.terminal import open_console

MOST_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class RingCommand:
    """All-reduce = reduce-scatter + all-gather: sends around a ring, counted, for 2 to 8 ranks.

    Attributes:
        size: Float64 numbers that every rank brings; the default is a prime, which no number of ranks divides.
        nproc: Most ranks, started on this machine when no launcher has; default: 8.
        json: File to write all figures to; None: none.
        debug: Show the traceback of an error.
    """

    size: int = 100_003
    nproc: int | None = None
    json: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        """Checks the range.

        Raises:
            ValueError: If the size is negative.
        """
        check_integer("size", self.size, minimum=0)


def table(rows: list[Row], num_elements: int) -> Table:
    """The rows for people.

    Args:
        rows: What was measured.
        num_elements: Numbers that every rank brought.
    """
    title = f"all-reduce of {num_elements:,} float64 numbers, P = {num_elements * 8:,} bytes"
    result = Table(title=title, title_justify="left")
    for column in (
        "ranks N",
        "P padded",
        "a rank of the ring\nsends",
        "2P(N-1)/N",
        "rank 0 in the middle\nreceives + sends",
    ):
        result.add_column(column, justify="right")
    result.add_column("2P(N-1)", justify="right")
    result.add_column("error / allowed", justify="right")
    for row in rows:
        figures = (row.padded_bytes, row.ring_bytes, row.ring_theory_bytes, row.central_bytes, row.central_theory_bytes)
        result.add_row(str(row.num_ranks), *(f"{each:,}" for each in figures), f"{row.largest_error:.2f}")
    result.caption = (
        "Bytes are counted, send by send. Error: largest difference to the library's all_reduce, as a share of the\n"
        "N eps sum|x| by which two orders of adding may differ; up to 1 both are exact."
    )
    result.caption_justify = "left"
    return result


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: If it fails, or a figure is not the one that theory says.
    """
    debug = "--debug" in (sys.argv if arguments is None else arguments)
    with one_message(debug=debug):
        command = parse(RingCommand, arguments, "python -m recipes.ring")
        world_size_to_come(command.nproc)
        rows = run(measure, command.size, num_processes=command.nproc or MOST_RANKS, debug=debug)
        if not is_first_rank():
            return
        console = open_console(120)
        console.print(table(rows, command.size))
        if command.json is not None:
            figures = {"num_elements": command.size, "rows": [asdict(row) for row in rows]}
            Path(command.json).write_text(json.dumps(figures, indent=1))
        if not all(row.is_right for row in rows):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
