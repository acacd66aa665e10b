"""Where commands print: the terminal at its width, or a file or pipe at a width of their own."""

from rich.console import Console


def open_console(width: int) -> Console:
    """A console that colours nothing by itself.

    Args:
        width: Columns where the output is no terminal, for which rich would take 80.
    """
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)
