"""The command `python -m recipes.sharding_by_hand`."""

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
from recipes.sharding_by_hand.train import Comparison, Moment, compare
from recipes.terminal import open_console


@dataclass(frozen=True, kw_only=True)
class ShardingCommand:
    """Trains a small model with a sharding unit written by hand and with fully_shard, and shows the life of a unit.

    Attributes:
        steps: Steps of training.
        nproc: Ranks to start on this machine when no launcher has; default: one for each GPU, or 2 without any.
        json: File to write all figures to; None: none.
        debug: Show the traceback of an error.
    """

    steps: int = 5
    nproc: int | None = None
    json: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        """Checks the range.

        Raises:
            ValueError: If there is no step.
        """
        check_integer("steps", self.steps, minimum=1)


def life_table(life: list[Moment]) -> Table:
    """What happened to the units, for people.

    Args:
        life: In order.
    """
    table = Table(title="the life of the units until the end of the first step, on rank 0", title_justify="left")
    for column in ("unit", "what happens"):
        table.add_column(column)
    for column in ("sends", "holds whole", "whole gradients", "shards"):
        table.add_column(column, justify="right")
    for each in life:
        figures = (each.whole_bytes, each.gradient_bytes, each.shard_bytes)
        sent = f"{each.sent_bytes:,}" if each.sent_bytes else ""
        table.add_row(each.unit, each.what, sent, *(f"{figure:,}" for figure in figures))
    table.caption = "Bytes: sent around a ring, held as the live tensors say. Shards: parameters and reduced gradients."
    table.caption_justify = "left"
    return table


def losses_table(comparison: Comparison) -> Table:
    """Both losses of each step, for people.

    Args:
        comparison: Both runs.
    """
    table = Table("step", "loss by hand", "fully_shard", title="losses, float64", title_justify="left")
    for step, losses in enumerate(zip(comparison.by_hand, comparison.fully_shard, strict=True), 1):
        table.add_row(str(step), *(f"{loss:.14f}" for loss in losses))
    table.caption = f"largest difference {comparison.difference:.1e}"
    return table


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: If it fails.
    """
    debug = "--debug" in (sys.argv if arguments is None else arguments)
    with one_message(debug=debug):
        command = parse(ShardingCommand, arguments, "python -m recipes.sharding_by_hand")
        world_size_to_come(command.nproc)
        comparison = run(compare, command.steps, num_processes=command.nproc, debug=debug)
        if not is_first_rank():
            return
        console = open_console(120)
        console.print(life_table(comparison.life), losses_table(comparison), sep="\n")
        if command.json is not None:
            Path(command.json).write_text(json.dumps(asdict(comparison), indent=1))


if __name__ == "__main__":
    main()
