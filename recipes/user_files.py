"""Imports Python files of the user's own, and imports them again on ranks that start from nothing."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PREFIX = "_user_file_"


def import_user_file(path: Path) -> ModuleType:
    """Runs a file as a module.

    Args:
        path: The file.

    Raises:
        ValueError: If it is not there or raises.
    """
    if not path.is_file():
        raise ValueError(f"there is no recipe file {str(path)!r}")
    name = _PREFIX + path.stem
    specification = importlib.util.spec_from_file_location(name, path.resolve())
    if specification is None or specification.loader is None:
        raise ValueError(f"{str(path)!r} cannot be imported")
    # Known to Python as an import would make it, because dataclasses look their module up.
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"the recipe file {str(path)!r} raised {type(error).__name__}: {error}") from error
    return module


def imported_user_files() -> list[str]:
    """Paths of the files that this process has imported."""
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith(_PREFIX)]
