"""A model of a disk that forgets what was not synced."""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Entries = dict[str, "File | Folder"]
Change = dict[str, "File | Folder | None"]
"""Names that change at once, and what they then stand for; None: for nothing."""

OF_DESCRIPTORS = ("write", "write_at", "sync", "start_writeback", "set_direct")


@dataclass
class File:
    """Bytes as programs see them, and how many of them are on disk."""

    content: bytes = b""
    num_synced: int = 0


@dataclass
class Folder:
    """Names on disk, and changes that are not."""

    synced: Entries = field(default_factory=dict)
    unsynced: list[Change] = field(default_factory=list)

    def entries(self, kept: list[Change] | None = None) -> Entries:
        """Names with some of the changes, as programs see them with all."""
        entries: dict[str, File | Folder | None] = dict(self.synced)
        for change in self.unsynced if kept is None else kept:
            entries |= change
        return {name: node for name, node in entries.items() if node is not None}


@dataclass(frozen=True)
class Loss:
    """What a power failure takes of what was not synced.

    Attributes:
        names: Share of the changes of names that are lost.
        content: Share of the bytes that are lost, from the end of each file.
        seed: Chooses among them.
    """

    names: float
    content: float
    seed: int = 0


class Disk:
    """The folder that a program works in, change by change."""

    def __init__(self, root: Path) -> None:
        """Starts with what is there, all of it synced."""
        self.root = root
        self.top = self._read(root)

    def apply(self, call: str, *args: Any) -> None:
        """Does what a call of `checkpoint.filesystem` does; files are named by their paths instead of descriptors."""
        if call in ("start_writeback", "set_direct"):
            return
        if call in ("sync", "write", "write_at"):
            file = self._find(args[0])
            assert isinstance(file, File)
            if call == "sync":
                file.num_synced = len(file.content)
            else:
                assert call == "write" or args[2] == len(file.content)
                file.content += args[1]
            return
        if call == "sync_folder":
            folder = self._find(args[0])
            assert isinstance(folder, Folder)
            folder.synced, folder.unsynced = folder.entries(), []
            return
        path = Path(args[0])
        changes: dict[str, Change] = {
            "make_folder": {path.name: Folder()},
            "create": {path.name: File()},
            "remove_file": {path.name: None},
            "remove_folder": {path.name: None},
        }
        if call == "rename":
            assert path.parent == Path(args[1]).parent
            changes["rename"] = {path.name: None, Path(args[1]).name: self._find(path)}
        parent = self._find(path.parent)
        assert isinstance(parent, Folder)
        parent.unsynced.append(changes[call])

    def write_to(self, target: Path, loss: Loss) -> None:
        """Writes what is left after a power failure."""
        self._write(self.top, target, loss, random.Random(loss.seed))

    def _write(self, folder: Folder, target: Path, loss: Loss, chance: random.Random) -> None:
        target.mkdir()
        kept = [change for change in folder.unsynced if chance.random() >= loss.names]
        for name, node in folder.entries(kept).items():
            if isinstance(node, Folder):
                self._write(node, target / name, loss, chance)
            else:
                num_bytes = len(node.content) - int(loss.content * (len(node.content) - node.num_synced))
                (target / name).write_bytes(node.content[:num_bytes])

    def _find(self, path: Path) -> File | Folder | None:
        node: File | Folder = self.top
        for name in Path(path).relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.entries()[name]
        return node

    def _read(self, path: Path) -> Folder:
        entries: Entries = {}
        for each in path.iterdir():
            content = b"" if each.is_dir() else each.read_bytes()
            entries[each.name] = self._read(each) if each.is_dir() else File(content, len(content))
        return Folder(entries)


def named(call: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A call as `Disk.apply` takes it, whatever becomes of descriptors and memory."""
    if call not in OF_DESCRIPTORS:
        return (call, *args)
    path = Path(os.readlink(f"/proc/self/fd/{args[0]}"))
    if call == "write":
        return (call, path, b"".join(bytes(each.cast("B")) for each in args[1]))
    return (call, path, bytes(args[1]), args[2]) if call == "write_at" else (call, path)
