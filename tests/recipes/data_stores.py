"""Small texts for tests, through the code that a run reads its own with."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from recipes.data import ByteTokenizer
from recipes.data.config import SourceConfig
from recipes.data.documents import Document, Problems, Reader, Segment
from recipes.data.encode import write_tokens
from recipes.data.files import find_files
from recipes.data.store import TokenStore, open_store
from recipes.data.text_files import read_text_files


def byte_store(*texts: bytes) -> TokenStore:
    """Texts as tokens, one a byte."""
    tokenizer = ByteTokenizer()
    documents = [
        Document(name=str(number), segments=[Segment(tokenizer.bos), Segment(text), Segment(tokenizer.eos)])
        for number, text in enumerate(texts)
    ]
    # A mapped file may be removed.
    with tempfile.TemporaryDirectory() as folder:
        told = write_tokens(documents, tokenizer, Path(folder), chooses=False)
        return open_store(Path(folder), "train", told["train"], pad=tokenizer.pad, vocab_size=tokenizer.vocab_size)


def read_texts(source: SourceConfig) -> tuple[list[tuple[str, bytes]], list[tuple[str, bytes]]]:
    """Names and texts of the files to train on, and of the held-out ones."""
    reader = Reader(
        tokenizer=ByteTokenizer(), problems=Problems(skip=False), advance=lambda _: None, max_record_bytes=1 << 20
    )
    sides: tuple[list[tuple[str, bytes]], list[tuple[str, bytes]]] = ([], [])
    for document in read_text_files(find_files(source), source.held_out_fraction, reader):
        parts = [segment.content for segment in document.segments]
        sides[document.held_out].append((document.name, b"".join(part for part in parts if isinstance(part, bytes))))
    return sides


def write_lines(path: Path, records: Sequence[object]) -> str:
    """A file of JSONL; gives its path."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def train_tokenizer(path: Path, *, specials: Sequence[str] = ("<|endoftext|>",), vocab_size: int = 280) -> str:
    """Trains a tiny tokenizer and writes its `tokenizer.json`; gives its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the dog and the hat\nuser assistant\n" * 4], trainer)
    tokenizer.save(str(path))
    return str(path)
