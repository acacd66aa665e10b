"""Tells which folder shadows one of the packages that are installed beside this one."""

import warnings
from importlib.util import find_spec
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent


def check_siblings(needed: tuple[str, ...]) -> None:
    """Checks, without importing them, that packages resolve to the ones installed beside `parallel`.

    Their names are common ones, and a folder of a user that comes first on the path hides them.

    Args:
        needed: Names of top-level packages.

    Raises:
        ImportError: If one is missing, or resolves to something else.
    """
    for name in needed:
        found = _location(name)
        if found is None:
            raise ImportError(f"`{name}` is missing beside {_HOME / 'parallel'}; install meshwright again")
        if found != _HOME / name:
            raise ImportError(
                f"`{name}` resolves to {found}, which shadows meshwright's own; "
                "rename that one or run from another folder"
            )


def warn_of_shadows(names: tuple[str, ...]) -> None:
    """Warns of packages that resolve to a folder of the user's; importing one then fails without saying why.

    Args:
        names: Names of top-level packages that this one does without.
    """
    for name in names:
        found = _location(name)
        if found is not None and found != _HOME / name:
            warnings.warn(
                f"`{name}` resolves to {found}, which shadows meshwright's own: importing from it will fail; rename "
                "that one or run from another folder",
                stacklevel=3,
            )


def _location(name: str) -> Path | None:
    """The folder, or the file of a module without one, that `import name` would take."""
    spec = find_spec(name)
    if spec is None:
        return None
    # Not spec.origin: a folder without __init__.py has none.
    folders = list(spec.submodule_search_locations or ())
    place = folders[0] if folders else spec.origin
    return Path(place).resolve() if place else None
