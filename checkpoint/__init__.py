"""Saves a training state from any mesh and loads it onto any other."""

try:
    from parallel.shadowing import check_siblings
except ModuleNotFoundError as error:
    if error.name != "parallel.shadowing":
        raise
    import parallel

    raise ImportError(
        f"`parallel` resolves to {parallel.__file__}, which shadows meshwright's own; "
        "rename that one or run from another folder"
    ) from None
else:
    check_siblings(("checkpoint",))

from checkpoint.background import BackgroundSaver
from checkpoint.files import read_manifest
from checkpoint.manifest import Manifest
from checkpoint.reader import ShardReader
from checkpoint.retention import Retention
from checkpoint.state import TrainState
from checkpoint.steps import latest
from checkpoint.store import load, save
from checkpoint.verify import verify

__all__ = [
    "BackgroundSaver",
    "Manifest",
    "Retention",
    "ShardReader",
    "TrainState",
    "latest",
    "load",
    "read_manifest",
    "save",
    "verify",
]
