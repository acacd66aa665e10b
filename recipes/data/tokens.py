"""The tokens of one source: from the cache, or made from its files."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from recipes.data.cache import cached
from recipes.data.config import DataConfig, SourceConfig
from recipes.data.documents import Document, Problems, Reader, refuse_problem
from recipes.data.encode import SIDES, write_tokens
from recipes.data.files import SourceFile, find_files, format_of
from recipes.data.jsonl import read_jsonl
from recipes.data.parquet import read_parquet
from recipes.data.progress import show_progress
from recipes.data.records import RecordSplit, record_documents, record_fields
from recipes.data.store import TokenStore, open_store
from recipes.data.text_files import read_text_files
from recipes.data.tokenizer import load_tokenizer
from recipes.data.tokenizer_file import tokenizer_identity

# Of the files that the cache holds and of what they mean: raised whenever the same data give other files.
_VERSION = 1


class SourceTokens(NamedTuple):
    """The tokens of a source.

    Attributes:
        train: Documents to train on.
        held_out: Documents to evaluate on; none of them where nothing is held out.
        num_skipped: Files and records left out because they cannot be used.
        first_skipped: Where and why the first of them was.
        num_empty: Text files left out because they hold no text.
    """

    train: TokenStore
    held_out: TokenStore
    num_skipped: int
    first_skipped: str
    num_empty: int


def load_tokens(source: SourceConfig, config: DataConfig) -> SourceTokens:
    """The tokens of a source; the same in every process, made once.

    Args:
        source: Which text.
        config: Its tokenizer, its cache, and what to do with what cannot be used.

    Raises:
        ValueError: If files are missing, unreadable or without text, or hold what cannot be used and `on_error` does
            not say to leave it out; if the tokenizer cannot be used, or the cache cannot be written.
    """
    work = _Work(source=source, config=config, files=find_files(source))
    tokens = cached(cache_folder(config), work.key(), open_it=_open, make_it=work.make)
    if tokens.num_skipped and config.on_error == "raise":
        # They were made by a run that left it out.
        refuse_problem(tokens.first_skipped)
    return tokens


def cache_folder(config: DataConfig) -> Path:
    """Where tokens are kept.

    Args:
        config: Which may name a folder.
    """
    if config.cache is not None:
        return Path(os.path.expanduser(config.cache))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "meshwright" / "tokens"


@dataclass(frozen=True, kw_only=True)
class _Work:
    source: SourceConfig
    config: DataConfig
    files: Sequence[SourceFile]

    def key(self) -> str:
        """A name for all that the tokens depend on; a file counts as the same while size and time are."""
        format_ = format_of(self.source, self.files)
        settings = {
            "version": _VERSION,
            "files": [(os.fsencode(os.path.realpath(file.path)).hex(), *file[2:]) for file in self.files],
            "format": format_,
            "tokenizer": tokenizer_identity(self.config.tokenizer),
            "held_out_fraction": self.source.held_out_fraction,
        }
        if format_ != "text":
            how = "chat_template" if self.source.record == "chat" else "text_field"
            settings["record"] = [self.source.record, getattr(self.source, how), self.config.max_record_bytes]
        digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=12).hexdigest()
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(self.source.source.rstrip("/")))[-40:].lstrip(".-")
        return f"{stem}-{digest}" if stem else digest

    def make(self, folder: Path) -> None:
        """Fills a folder that `_open` reads."""
        tokenizer = load_tokenizer(self.config.tokenizer)
        split: RecordSplit | None = RecordSplit(self.source.held_out_fraction)
        # A second time only where chance held out all records or none.
        while split is not None:
            problems = Problems(skip=self.config.on_error == "skip")
            with show_progress(self.source.source, sum(file.num_bytes for file in self.files)) as advance:
                reader = Reader(
                    tokenizer=tokenizer,
                    problems=problems,
                    advance=advance,
                    max_record_bytes=self.config.max_record_bytes,
                )
                chooses = self.source.record == "chat"
                told = write_tokens(self._documents(split, reader), tokenizer, folder, chooses=chooses)
            split = split.corrected()
        if find_files(self.source) != self.files:
            raise ValueError(
                f"the files of {self.source.source!r} (data source) changed while they were read; run again"
            )
        if not any(side["num_documents"] for side in told.values()):
            raise ValueError(self._nothing(problems))
        meta = {
            **told,
            "pad": tokenizer.pad,
            "vocab_size": tokenizer.vocab_size,
            "num_skipped": problems.num_skipped,
            "first_skipped": problems.first,
            "num_empty": problems.num_empty,
        }
        # Last, so that a folder with it is complete.
        (folder / "meta.json").write_text(json.dumps(meta))

    def _documents(self, split: RecordSplit, reader: Reader) -> Iterator[Document]:
        format_ = format_of(self.source, self.files)
        if format_ == "text":
            return read_text_files(self.files, self.source.held_out_fraction, reader)
        if format_ == "jsonl":
            records = read_jsonl(self.files, reader)
        else:
            records = read_parquet(self.files, record_fields(self.source), reader)
        return record_documents(records, self.source, split, reader)

    def _nothing(self, problems: Problems) -> str:
        if problems.num_skipped:
            return (
                f"no text in {self.source.source!r} that can be used: all of it was left out ({problems.num_skipped} "
                f"files and records), the first being {problems.first}"
            )
        return f"no text in {self.source.source!r}: {len(self.files)} file(s) read, all of them empty"


def _open(folder: Path) -> SourceTokens | None:
    """The tokens in a folder; None if it is not there, or not as it was written."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        kinds = {"pad": meta["pad"], "vocab_size": meta["vocab_size"]}
        train, held_out = (open_store(folder, side, meta[side], **kinds) for side in SIDES)
        return SourceTokens(train, held_out, meta["num_skipped"], meta["first_skipped"], meta["num_empty"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
