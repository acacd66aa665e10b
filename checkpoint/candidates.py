"""Finds the checkpoints that a path may mean, the one to try first before the others."""

from collections.abc import Iterator
from pathlib import Path

from checkpoint import files, steps
from checkpoint.manifest import MANIFEST_NAME, Manifest
from checkpoint.ranks import Ranks


class Candidates:
    """One checkpoint, or those of a folder from the newest on; ranks ask for them together.

    One rank looks at folders, so that ranks together do not ask a file system for ranks x files; each parses the
    manifest, all at the same time.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        """Looks at nothing yet.

        Args:
            path: A checkpoint, or where a run keeps them.
            ranks: Ranks of this load.
        """
        self.path, self.ranks = path, ranks
        self._left = self._texts()

    def next(self, failure: Exception | None) -> tuple[Path, Manifest]:
        """The next one whose manifest is sound and whose files are there; a warning tells of each that is skipped.

        Args:
            failure: Why the one before it did not do.

        Raises:
            ValueError: If there is none, or the path is one checkpoint and that is damaged.
            OSError: If it cannot be read.
        """
        while True:
            found, text = self.ranks.on_coordinator(f"load {self.path}", lambda: self._next_text(failure))

            def parse(found: Path = found, text: bytes = text) -> Manifest:
                manifest = Manifest.from_text(text, str(found / MANIFEST_NAME))
                if self.ranks.is_coordinator:
                    files.check_name(found, manifest)
                    files.check_files(found, manifest)
                return manifest

            try:
                return found, self.ranks.together(f"load {found}", parse)
            except (ValueError, OSError) as error:
                if found == self.path:
                    raise
                steps.warn_of_skipped("an incomplete or renamed checkpoint", error)

    def _next_text(self, failure: Exception | None) -> tuple[Path, bytes]:
        found = next(self._left, None)
        if found is not None:
            return found
        if isinstance(failure, OSError):
            raise OSError(failure.errno, f"{self.path} holds no other complete checkpoint: {failure}")
        if failure is not None:
            raise ValueError(f"{self.path} holds no other complete checkpoint: {failure}")
        raise ValueError(f"{self.path} holds no complete checkpoint (a folder step-<number> with {MANIFEST_NAME})")

    def _texts(self) -> Iterator[tuple[Path, bytes]]:
        """Each with the text of its manifest."""
        if not self.path.is_dir():
            what = ", but a file" if self.path.exists() else ""
            raise ValueError(f"there is no checkpoint: {self.path} is not a folder{what}")
        if (self.path / MANIFEST_NAME).exists():
            yield self.path, files.read_text(self.path)
            return
        for _, paths in steps.by_step(self.path):
            for path in paths:
                try:
                    text = files.read_text(path)
                except (ValueError, OSError) as error:
                    steps.warn_of_skipped("an incomplete or renamed checkpoint", error)
                else:
                    yield path, text
