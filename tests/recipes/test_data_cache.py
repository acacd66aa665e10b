"""Tokens are made once, by one process, whole or not at all."""

import fcntl
import json
import multiprocessing
import os
import signal
import time
import tracemalloc
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.data import DataConfig, TextData, TokenizerConfig, encode, load_dataset, store, tokens
from recipes.data.cache import cached
from tests.recipes.data_stores import train_tokenizer, write_lines

_fork = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "meshwright" / "tokens"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text\n" * 300)
    return tmp_path / "a.txt"


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often tokens were made, in any process."""
    made = tmp_path / "made"

    def write_tokens(*args: Any, **kwargs: Any) -> Any:
        with open(made, "a") as file:
            file.write("x")
        time.sleep(0.05)
        return encode.write_tokens(*args, **kwargs)

    monkeypatch.setattr("recipes.data.tokens.write_tokens", write_tokens)
    return lambda: len(made.read_text()) if made.exists() else 0


def _load(path: Path, **values: Any) -> TextData:
    values.setdefault("sequence_length", 64)
    return load_dataset(DataConfig(source=str(path), **values))


def _left(folder: Path) -> list[str]:
    return sorted(each.name.split(".")[-1] for each in folder.iterdir() if not each.name.endswith(".lock"))


def test_a_second_run_makes_no_tokens_and_maps_the_same_ones(
    path: Path, folder: Path, count: Callable[[], int]
) -> None:
    first, again = _load(path), _load(path)
    assert count() == 1
    assert first.train.fingerprint == again.train.fingerprint
    for index in range(first.train.num_samples):
        assert first.train.sample(index).labels.tolist() == again.train.sample(index).labels.tolist()
    (made,) = [each for each in folder.iterdir() if each.is_dir()]
    opened = tokens._open(made)
    assert opened is not None
    assert isinstance(opened.train.tokens, np.memmap)
    assert not opened.train.tokens.flags.writeable


def test_tokens_do_not_depend_on_how_they_are_cut_and_ordered(
    path: Path, folder: Path, count: Callable[[], int]
) -> None:
    _load(path)
    _load(path, sequence_length=32, seed=5, attend_across_documents=True, on_error="skip", text_field="x")
    assert count() == 1


@pytest.mark.parametrize(
    "change",
    [
        {"held_out_fraction": 0.2},
        {"format": "jsonl"},
        {"text_field": "other"},
        {"record": "chat"},
        {"tokenizer": True},
        {"max_record_bytes": 1000},
    ],
)
def test_what_changes_the_tokens_makes_new_ones(
    tmp_path: Path, folder: Path, count: Callable[[], int], change: dict[str, Any]
) -> None:
    path = tmp_path / "a.jsonl"
    fields = ("text", "other", "prompt", "completion")
    write_lines(path, [{field: f"{field} {number}" for field in fields} for number in range(20)])
    if "tokenizer" in change:
        change = {"tokenizer": TokenizerConfig(file=train_tokenizer(tmp_path / "tokenizer.json"))}
    before: dict[str, Any] = {"held_out_fraction": 0.4, "format": "text" if "format" in change else "auto"}
    prints = {_load(path, **before).train.fingerprint}
    for _ in range(2):
        prints.add(_load(path, **before | change).train.fingerprint)
        assert count() == 2
    assert len(prints) == 2 or "max_record_bytes" in change


def test_another_tokenizer_in_the_same_file_makes_new_tokens(tmp_path: Path, path: Path, folder: Path) -> None:
    path.write_text("the cat and the dog\n" * 300)
    prints = set()
    for vocab_size, eos in ((258, None), (280, None), (280, "a")):
        file = train_tokenizer(tmp_path / "tokenizer.json", vocab_size=vocab_size)
        prints.add(_load(path, tokenizer=TokenizerConfig(file=file, eos=eos)).train.fingerprint)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    prints.add(_load(path, tokenizer=TokenizerConfig(file=str(tmp_path / "tokenizer.json"))).train.fingerprint)
    assert len(prints) == 4


def test_a_changed_file_makes_new_tokens_and_the_same_text_the_same_data(
    path: Path, folder: Path, count: Callable[[], int]
) -> None:
    before = _load(path).train.fingerprint
    path.write_text("same size\n" * 300)
    os.utime(path, ns=(0, 1))
    changed = _load(path).train.fingerprint
    assert changed != before
    path.write_text("some text\n" * 300)
    os.utime(path, ns=(0, 2))
    assert _load(path).train.fingerprint == before
    assert count() == 3
    path.write_text("some text\n" * 301)
    os.utime(path, ns=(0, 2))
    assert _load(path).train.fingerprint not in (before, changed)


def _load_in_child(sender: Connection, path: Path) -> None:
    try:
        sender.send(_load(path).train.fingerprint)
    except ValueError as error:
        sender.send(str(error))


def _start(path: Path) -> tuple[Any, Connection]:
    receiver, sender = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_load_in_child, args=(sender, path))
    process.start()
    sender.close()
    return process, receiver


def test_of_several_processes_at_once_one_makes_the_tokens_and_all_get_them(
    path: Path, folder: Path, count: Callable[[], int]
) -> None:
    children = [_start(path) for _ in range(5)]
    prints = [receiver.recv() for _, receiver in children]
    for process, _ in children:
        process.join(10)
        assert process.exitcode == 0
    assert count() == 1
    assert set(prints) == {_load(path).train.fingerprint}
    assert len(_left(folder)) == 1


def test_of_several_processes_at_once_one_fails_and_all_get_its_error(
    path: Path, folder: Path, count: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(_: object) -> None:
        time.sleep(0.5)
        raise ValueError("broken text")

    monkeypatch.setattr(store.StoreWriter, "finish", finish)
    children = [_start(path) for _ in range(4)]
    assert [receiver.recv() for _, receiver in children] == ["broken text"] * 4
    for process, _ in children:
        process.join(10)
    # The others waited for the first one.
    assert count() == 1
    # A later run tries again.
    with pytest.raises(ValueError, match="broken text"):
        _load(path)
    assert count() == 2
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[1]))
    _load(path)
    assert not list(folder.glob("*.error"))


def test_where_there_are_no_locks_processes_make_the_tokens_each_for_itself(
    path: Path, folder: Path, count: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    children = [_start(path) for _ in range(4)]
    prints = [receiver.recv() for _, receiver in children]
    for process, _ in children:
        process.join(10)
    assert set(prints) == {_load(path).train.fingerprint}
    assert 1 <= count() <= 4
    assert len(_left(folder)) == 1


def test_without_locks_what_another_process_has_made_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError("no locks here")

    def make(folder: Path) -> None:
        (folder / "text").write_text("mine")

    def open_it(folder: Path) -> str | None:
        return (folder / "text").read_text() if folder.exists() else None

    rename = Path.rename

    def rename_late(self: Path, target: Path) -> Path:
        target.mkdir()
        (target / "text").write_text("other")
        return rename(self, target)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(Path, "rename", rename_late)
    assert cached(tmp_path, "key", open_it=open_it, make_it=make) == "other"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["key", "key.lock"]


@pytest.mark.parametrize("point", ["tokens", "meta", "rename"])
def test_a_process_killed_at_work_leaves_nothing_that_a_later_run_would_take(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    receiver, sender = _fork.Pipe(duplex=False)

    def stop(*_: object, **__: object) -> None:
        sender.send("at work")
        time.sleep(60)

    with monkeypatch.context() as patch:
        if point == "tokens":
            patch.setattr(store.StoreWriter, "finish", stop)
        elif point == "meta":
            patch.setattr(Path, "write_text", stop)
        else:
            patch.setattr(Path, "rename", stop)
        process, _ = _start(path)
        assert receiver.recv() == "at work"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    (left,) = _left(folder)
    assert left == "tmp"
    data = _load(path)
    assert data.train.num_tokens + data.train.num_documents > 2800
    assert len(_left(folder)) == 1
    assert _left(folder) != ["tmp"]


@pytest.mark.parametrize("name", ["train.tokens", "train.starts", "held_out.tokens", "meta.json"])
@pytest.mark.parametrize("damage", ["short", "long", "gone"])
def test_a_damaged_cache_is_made_again(
    path: Path, folder: Path, count: Callable[[], int], name: str, damage: str
) -> None:
    before = _load(path).train.fingerprint
    (made,) = [each for each in folder.iterdir() if each.is_dir()]
    file = made / name
    if damage == "gone":
        file.unlink()
    elif damage == "long":
        file.write_bytes(file.read_bytes() + b"x")
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert _load(path).train.fingerprint == before
    assert count() == 2
    assert _load(path).train.fingerprint == before
    assert count() == 2


def test_files_that_change_while_they_are_read_are_refused(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_tokens(*args: Any, **kwargs: Any) -> Any:
        made = encode.write_tokens(*args, **kwargs)
        with open(path, "a") as file:
            file.write("more")
        return made

    monkeypatch.setattr("recipes.data.tokens.write_tokens", write_tokens)
    with pytest.raises(ValueError, match=r"a\.txt' \(data source\) changed while they were read"):
        _load(path)
    assert _left(folder) == ["error"]


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path, path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to the cache of tokens .*file/cache.*name another folder"):
        _load(path, cache=str(tmp_path / "file" / "cache"))


def test_a_full_disk_is_named_and_leaves_nothing(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._HashedFile, "write", write)
    with pytest.raises(ValueError, match=r"cannot write to the cache .*No space left on device; make room"):
        _load(path)
    assert _left(folder) == []


def test_a_cache_named_in_the_config_is_used_and_may_be_read_only(tmp_path: Path, path: Path) -> None:
    before = _load(path, cache=str(tmp_path / "mine")).train.fingerprint
    assert len(_left(tmp_path / "mine")) == 1
    tried: list[object] = []

    def never(_: Path) -> None:
        tried.append(0)

    (key,) = [each.name for each in (tmp_path / "mine").iterdir() if each.is_dir()]
    found = cached(tmp_path / "mine", key, open_it=tokens._open, make_it=never)
    assert found.train.fingerprint == before
    assert not tried


def test_the_cache_is_open_to_all_whom_the_mask_of_the_process_lets_in(path: Path, folder: Path) -> None:
    mask = os.umask(0o027)
    try:
        _load(path)
    finally:
        os.umask(mask)
    (made,) = [each for each in folder.iterdir() if each.is_dir()]
    assert made.stat().st_mode & 0o777 == 0o750


def test_a_large_file_needs_little_memory(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "a.txt"
    line = b"the quick brown fox jumps over the lazy dog 0123456789\n"
    path.write_bytes(line * (24_000_000 // len(line)))
    config = DataConfig(source=str(path), sequence_length=256, held_out_fraction=0.01)
    tracemalloc.start()
    try:
        data = load_dataset(config)
        for index in range(0, data.train.num_samples, 1000):
            data.train.sample(index)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert data.train.num_tokens > 23_000_000
    # A few batches of text and tokens; the file as tokens has 48 MB.
    assert peak_bytes < 20_000_000


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_large_document_of_one_line_needs_little_memory_with_a_tokenizer_too(
    tmp_path: Path, folder: Path, suffix: str
) -> None:
    status = Path("/proc/self/status")
    try:
        # Resets the peak of the process.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not tell the peak memory of a process")

    def measured(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1]) << 10

    path = tmp_path / f"a.{suffix}"
    text = "the cat and the dog and the hat " * 100_000
    path.write_text(text if suffix == "txt" else json.dumps({"text": text}))
    tokenizer = TokenizerConfig(file=train_tokenizer(tmp_path / "tokenizer.json"))
    # Whatever the first use of a package needs is no matter of the file.
    (tmp_path / "b.txt").write_text("the cat and the dog " * 100)
    _load(tmp_path / "b.txt", tokenizer=tokenizer)
    Path("/proc/self/clear_refs").write_text("5")
    before = measured("VmRSS")
    data = _load(path, tokenizer=tokenizer, held_out_fraction=0)
    grown = measured("VmHWM") - before
    assert data.train.num_tokens > 400_000
    # In one piece it would take 300 MB and more.
    assert grown < 120_000_000, grown


def test_a_line_beyond_the_limit_is_never_held_whole(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "good text"}\n{"text": "')
        for _ in range(40):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"text": "good again"}\n')
    tracemalloc.start()
    try:
        with pytest.warns(UserWarning, match="line 2: longer than max_record_bytes=1000000"):
            data = _load(path, max_record_bytes=1_000_000, on_error="skip", held_out_fraction=0, sequence_length=8)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert data.reports[0].num_documents == 2
    assert peak_bytes < 8_000_000


def test_a_large_vocabulary_has_tokens_of_four_bytes(tmp_path: Path) -> None:
    for vocab_size, dtype in ((1 << 16, "uint16"), ((1 << 16) + 1, "uint32")):
        writer = store.StoreWriter(tmp_path, "train", vocab_size, chooses=False)
        with writer:
            writer.add(np.array([vocab_size - 1, 5]), np.array([0]), np.array([True, True]))
            told = writer.finish()
        opened = store.open_store(tmp_path, "train", told, pad=0, vocab_size=vocab_size)
        assert opened.tokens.dtype == dtype
        assert opened.tokens.tolist() == [vocab_size - 1, 5]
        assert opened.starts.tolist() == [0, 2]


def test_batches_of_any_size_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, [{"prompt": "p" * (number % 7), "completion": f"to {number}"} for number in range(50)])
    prints = set()
    for number, (num_bytes, num_items) in enumerate([(1 << 21, 1 << 14), (1, 1), (20, 1 << 14), (1 << 21, 7)]):
        monkeypatch.setattr(encode, "_BATCH_BYTES", num_bytes)
        monkeypatch.setattr(encode, "_BATCH_ITEMS", num_items)
        prints.add(_load(path, record="chat", cache=str(tmp_path / str(number))).train.fingerprint)
    assert len(prints) == 1


def test_files_are_told_apart_by_where_they_are(tmp_path: Path, folder: Path) -> None:
    prints = set()
    for name in ("one", "two"):
        texts = tmp_path / name / "texts"
        texts.mkdir(parents=True)
        (texts / "a.txt").write_text(f"{name} " * 100)
        os.utime(texts / "a.txt", ns=(0, 0))
        prints.add(_load(texts).train.fingerprint)
    assert len(prints) == 2
