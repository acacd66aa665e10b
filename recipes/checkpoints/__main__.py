"""The command `python -m recipes.checkpoints`."""

import sys
from typing import Annotated, Union

import tyro

from recipes.checkpoints.convert import ExportHf, ImportHf, Reshard
from recipes.checkpoints.dcp import ExportDcp, ImportDcp
from recipes.checkpoints.difference import Diff
from recipes.checkpoints.listing import Ls
from recipes.checkpoints.pruning import Prune
from recipes.checkpoints.report import EXIT_CODES
from recipes.checkpoints.show import Show
from recipes.checkpoints.verification import Verify
from recipes.launchers import is_first_rank
from recipes.messages import one_message
from recipes.refusals import in_one_form

COMMANDS = {
    "ls": Ls,
    "show": Show,
    "verify": Verify,
    "diff": Diff,
    "prune": Prune,
    "reshard": Reshard,
    "import-hf": ImportHf,
    "export-hf": ExportHf,
    "import-dcp": ImportDcp,
    "export-dcp": ExportDcp,
}
Command = Ls | Show | Verify | Diff | Prune | Reshard | ImportHf | ExportHf | ImportDcp | ExportDcp


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: With a code other than 0, see `EXIT_CODES`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with one_message(debug="--debug" in words):
        with in_one_form(words):
            command = tyro.cli(
                _subcommands(),
                args=words,
                prog="python -m recipes.checkpoints",
                description=f"Looks at checkpoints, checks, compares, divides and converts them.\n\n{EXIT_CODES}",
                console_outputs=is_first_rank(),
            )
        report = command.run()
        if is_first_rank():
            report.print(as_json=command.json)
    raise SystemExit(report.exit_code)


def _subcommands() -> type[Command]:
    named = tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())
    return Union[named]  # type: ignore[return-value]  # noqa: UP007  # of a tuple


if __name__ == "__main__":
    main()
