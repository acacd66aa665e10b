"""Tells a model's adapters from its base, which a checkpoint of adapters alone names and does not hold."""

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import xxhash
from torch import nn

from checkpoint import TrainState, read_manifest
from checkpoint.canonical import MODEL_PREFIX
from checkpoint.hub.folder import CONFIG_NAME, HubFolder, is_hub_folder, open_hub_folder
from checkpoint.manifest import MANIFEST_NAME, Manifest
from models.layers.lora import is_of_adapter
from parallel import Mesh, Trained
from parallel.backend import Backend

BASE = "base"
"""Name of a run's `AdapterBase` among what is stateful."""
READERS = 4
"""Files of a Hugging Face folder that are hashed at a time, of which each is read in parts."""
READ_BYTES = 4 << 20


class PartOf:
    """Some parameters of a model, for checkpoints to save or fill.

    Attributes:
        mesh: That of the model.
        backend: That of the model.
    """

    def __init__(self, trained: Trained, takes: Callable[[str], bool]) -> None:
        """Copies nothing.

        Args:
            trained: The model.
            takes: Tells by fqn whether a parameter is one of them.
        """
        self.mesh: Mesh = trained.mesh
        self.backend: Backend = trained.backend
        self._trained, self._takes = trained, takes

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Those of the parameters that this rank has, by fqn."""
        return {fqn: each for fqn, each in self._trained.named_parameters().items() if self._takes(fqn)}


def adapters_of(trained: Trained) -> PartOf:
    """The adapters of a model.

    Args:
        trained: The model.
    """
    return PartOf(trained, is_of_adapter)


def base_of(trained: Trained) -> PartOf:
    """The parameters that a model would have without adapters.

    Args:
        trained: The model.
    """
    return PartOf(trained, lambda fqn: not is_of_adapter(fqn))


def adapters_of_state(state: TrainState) -> TrainState:
    """A training state whose model is its adapters; all else is the same.

    Args:
        state: With the whole model; of its optimizer every parameter is one of an adapter.
    """
    return TrainState(
        trained=adapters_of(cast(Trained, state.trained)),
        optimizer=state.optimizer,
        stateful=state.stateful,
        step=state.step,
        num_tokens=state.num_tokens,
        recipe=state.recipe,
    )


@dataclass(frozen=True)
class AdapterBase:
    """The model that adapters were trained on; checkpoints of a run hold it as JSON.

    Attributes:
        path: One checkpoint, or a Hugging Face folder.
        digest: Hash that tells all of its values.
    """

    path: str
    digest: str

    @classmethod
    def at(cls, path: str) -> "AdapterBase":
        """Reads the table of contents of a checkpoint, or all of a Hugging Face folder, some MiB at a time.

        Args:
            path: One checkpoint, or a Hugging Face folder.

        Raises:
            ValueError: If it cannot be read.
            OSError: If it cannot be read.
        """
        return cls(os.path.abspath(path), _digest(path))

    def state_dict(self) -> Mapping[str, Any]:
        """Path and digest."""
        return {"path": self.path, "digest": self.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuses adapters of another base.

        Args:
            state: What `state_dict` gave when they were saved.

        Raises:
            ValueError: If the digests differ.
        """
        if state["digest"] != self.digest:
            raise ValueError(
                f"the adapters were trained on another base than {self.path}, which was then at {state['path']}; name "
                "that one as training.init_from"
            )


def holds(manifest: Manifest) -> tuple[bool, bool]:
    """Whether a checkpoint has parameters of a base, and whether it has some of adapters.

    Args:
        manifest: Its table of contents.
    """
    kinds = {is_of_adapter(name) for name in manifest.tensors if name.startswith(MODEL_PREFIX)}
    return False in kinds, True in kinds


def find_base(path: str, named: str | None = None) -> AdapterBase | None:
    """The base of a checkpoint of adapters alone: where it is named in it, or at another place if that is the same.

    One rank asks for all of them, as a Hugging Face folder is read as a whole.

    Args:
        path: One checkpoint, or a Hugging Face folder.
        named: Where else to look: one checkpoint, or such a folder.

    Returns:
        The base; None: it is in the checkpoint itself.

    Raises:
        ValueError: If the base is at neither place.
    """
    if is_hub_folder(path):
        return None
    manifest = read_manifest(path)
    if holds(manifest)[0]:
        return None
    saved = manifest.header.stateful.get(BASE)
    if saved is None:
        raise ValueError(f"{path} holds adapters and does not say of which base; it is none of recipes.train")
    places = [saved["path"], *({os.path.abspath(named)} - {saved["path"]} if named else ())]
    for each in places:
        if _has_digest(each, saved["digest"]):
            if each != places[-1]:
                warnings.warn(f"adapters go on with their own base, {each}; {places[-1]} is not used", stacklevel=2)
            return AdapterBase(each, saved["digest"])
    found = " and ".join(f"{each} ({'another model' if os.path.exists(each) else 'nothing'})" for each in places)
    raise ValueError(
        f"{path} holds adapters alone, and their base is not where it was: at {found}; put it back there, or let "
        "recipes.train go on with training.init_from at its new place and use what that saves"
    )


def base_path(path: str) -> str:
    """Where the base of a checkpoint lies: in itself, or where it says.

    Args:
        path: One checkpoint, or a Hugging Face folder.

    Raises:
        ValueError: If the checkpoint holds adapters alone and their base is not where it says.
    """
    found = find_base(path)
    return path if found is None else found.path


def _has_digest(path: str, digest: str) -> bool:
    """Whether a base lies at a path, where there may be anything."""
    try:
        return os.path.isdir(path) and _digest(path) == digest
    except (OSError, ValueError):
        return False


def _digest(path: str) -> str:
    """A hash of a manifest, which tells all values; of a Hugging Face folder one of its config and all its files."""
    if not is_hub_folder(path):
        with open(os.path.join(path, MANIFEST_NAME), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    with open(os.path.join(path, CONFIG_NAME), "rb") as file:
        config = file.read()
    folder = open_hub_folder(path)
    names = sorted(folder.files)
    with ThreadPoolExecutor(READERS) as readers:
        files = list(zip(names, readers.map(lambda name: _file_digest(folder, name), names), strict=True))
    return hashlib.sha256(config + repr(files).encode()).hexdigest()


def _file_digest(folder: HubFolder, name: str) -> str:
    """A hash of a file, header and values."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
    with os.fdopen(folder.open(name), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
