"""What JSONL and parquet give, which records are held out, and what happens to those that cannot be used."""

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.data import ByteTokenizer, DataConfig, Dataset, TokenizerConfig, load_dataset
from recipes.data.progress import show_progress
from tests.recipes.data_stores import train_tokenizer, write_lines

BOS, EOS = ByteTokenizer.bos, ByteTokenizer.eos


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def _texts(dataset: Dataset | None) -> list[str]:
    """The documents of a dataset, in order."""
    if dataset is None:
        return []
    tokens = [token for index in range(dataset.num_samples) for token in dataset.sample(index).tokens.tolist()]
    documents = bytes(token if token < 256 else 0 for token in tokens).split(b"\0")
    return [document.decode() for document in documents if document]


def _config(source: str | Path, **values: Any) -> DataConfig:
    defaults: dict[str, Any] = {"source": str(source), "sequence_length": 4, "held_out_fraction": 0}
    return DataConfig(**defaults | values)


def test_the_text_field_of_each_line_and_row_is_a_document(tmp_path: Path) -> None:
    texts = ["first", "zwei 漢字", "x" * 40]
    lines = write_lines(tmp_path / "a.jsonl", [{"id": number, "text": text} for number, text in enumerate(texts)])
    rows = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [0, 1, 2], "text": texts}), rows)
    for path in (lines, rows):
        assert _texts(load_dataset(_config(path)).train) == texts
    write_lines(tmp_path / "b.jsonl", [{"body": text} for text in texts])
    assert _texts(load_dataset(_config(tmp_path / "b.jsonl", text_field="body")).train) == texts
    with pytest.raises(ValueError, match=r"b\.jsonl', line 1: no field 'text' \(it has 'body'\)"):
        load_dataset(_config(tmp_path / "b.jsonl"))


def test_blank_lines_byte_order_mark_and_a_missing_last_line_break_are_legal(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two"}')
    assert _texts(load_dataset(_config(path)).train) == ["one", "two"]


def test_a_format_that_the_names_do_not_say_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_lines(path, [{"text": "one"}])
    assert _texts(load_dataset(_config(path, format="jsonl")).train) == ["one"]
    assert _texts(load_dataset(_config(path)).train) == ['{"text": "one"}\n']
    with pytest.raises(ValueError, match=r"record='chat' needs records, but 'a\.json'"):
        load_dataset(_config(path, record="chat"))
    with pytest.raises(ValueError, match="record='chat' needs records, but format='text'"):
        _config(path, record="chat", format="text")


def test_files_of_several_formats_are_refused_with_one_of_each(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_text('{"text": "one"}\n')
    with pytest.raises(ValueError, match=r"several formats: 'a.jsonl' is jsonl, 'b.txt' is text"):
        load_dataset(_config(tmp_path))
    assert _texts(load_dataset(_config(tmp_path, patterns=("*.jsonl",))).train) == ["one"]


def test_records_are_held_out_by_what_they_hold_wherever_they_stand(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(400)]
    records = [{"text": text} for text in texts]
    write_lines(tmp_path / "a.jsonl", records + records[::-1])
    data = load_dataset(_config(tmp_path / "a.jsonl", held_out_fraction=0.25))
    held_out, train = _texts(data.held_out), _texts(data.train)
    assert not set(held_out) & set(train)
    assert sorted(held_out + train) == sorted(texts * 2)
    assert 2 * 70 <= len(held_out) <= 2 * 130
    # In other files, and with more around them.
    write_lines(tmp_path / "b.jsonl", [{"text": f"more {number}"} for number in range(100)] + records[:300])
    pq.write_table(pa.table({"text": texts}), tmp_path / "c.parquet")
    more = set(_texts(load_dataset(_config(tmp_path / "b.jsonl", held_out_fraction=0.25)).held_out))
    assert {text for text in more if not text.startswith("more")} == {text for text in texts[:300] if text in held_out}
    rows = load_dataset(_config(tmp_path / "c.parquet", held_out_fraction=0.25)).held_out
    assert set(_texts(rows)) == set(held_out)


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_at_least_one_record_is_on_each_side(tmp_path: Path, fraction: float) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"text {number}"} for number in range(5)])
    data = load_dataset(_config(path, held_out_fraction=fraction))
    sides = sorted([len(_texts(data.train)), len(_texts(data.held_out))])
    assert sides == [1, 4]
    same = write_lines(tmp_path / "b.jsonl", [{"text": "same"}] * 5)
    with pytest.raises(ValueError, match=r"held_out_fraction=0\.\d+ needs two different records"):
        load_dataset(_config(same, held_out_fraction=fraction))


GOOD = b'{"text": "good"}\n'
BAD_LINES = [
    (b"{", "not JSON"),
    (b'{"text": "cut', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'["text"]', "no JSON object but list"),
    (b'{"body": "x"}', "no field 'text' .it has 'body'"),
    (b"{}", "no field 'text' .it is empty"),
    (b'{"text": null}', "its field 'text' is no text but NoneType"),
    (b'{"text": 5}', "its field 'text' is no text but int"),
    (b'{"text": ""}', "no text in its field 'text'"),
    (b'{"text": " \\n"}', "no text in its field 'text'"),
    (b'{"text": "\\ud800"}', "its field 'text' is no Unicode text"),
    (b'{"text": "\xff"}', "not UTF-8 text"),
    (b"\x00\x01\x02\xfe", "not UTF-8 text"),
    (b"\x00\x00", "not JSON"),
    (b'{"text": "' + b"x" * 200_000 + b'"}', "longer than max_record_bytes=150000"),
]


@pytest.mark.parametrize(("line", "why"), BAD_LINES)
def test_a_bad_line_is_an_error_with_file_and_line_or_is_left_out_and_counted(
    tmp_path: Path, line: bytes, why: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + line)
    where = rf"a\.jsonl', line 3: .*{why}"
    with pytest.raises(ValueError, match=where + r".*on_error='skip'"):
        load_dataset(_config(path, max_record_bytes=150_000))
    with pytest.warns(UserWarning, match=r"2 files and records of .* are left out.*" + where):
        data = load_dataset(_config(path, max_record_bytes=150_000, on_error="skip"))
    assert _texts(data.train) == ["good", "good"]
    (report,) = data.reports
    assert (report.num_skipped, report.num_documents) == (2, 2)
    assert "line 3" in report.first_skipped


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b""])
def test_a_record_may_have_exactly_the_longest_length(tmp_path: Path, ending: bytes) -> None:
    path = tmp_path / "a.jsonl"
    line = GOOD.strip() + ending
    path.write_bytes(line)
    assert _texts(load_dataset(_config(path, max_record_bytes=len(line.strip()))).train) == ["good"]
    with pytest.raises(ValueError, match="line 1: longer than max_record_bytes=15"):
        load_dataset(_config(path, max_record_bytes=len(line.strip()) - 1))


def _garbage(path: Path) -> None:
    path.write_bytes(b"PAR1 no parquet at all")


def _cut(path: Path) -> None:
    pq.write_table(pa.table({"text": ["good"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])


def _damaged(path: Path) -> None:
    pq.write_table(pa.table({"text": [f"text {number}" for number in range(1000)]}), path, compression="none")
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _no_rows(path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)


def _other_column(path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), path)


def _null(path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([None], pa.string())}), path)


def _number(path: Path) -> None:
    pq.write_table(pa.table({"text": [5]}), path)


def _huge(path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 200_000]}), path)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_garbage, "': a broken parquet file"),
        (_cut, "': a broken parquet file"),
        (_damaged, "': a broken parquet file"),
        (_empty, "': a broken parquet file"),
        (_no_rows, "': no rows"),
        (_other_column, r"': no column 'text' \(it has 'body'\)"),
        (_null, "', row 1: its field 'text' is no text but NoneType"),
        (_number, "', row 1: its field 'text' is no text but int"),
        (_huge, "', row 1: longer than max_record_bytes=150000"),
    ],
)
def test_a_bad_parquet_file_or_row_is_an_error_or_is_left_out_and_counted(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    spoil(tmp_path / "b.parquet")
    for name in ("a", "c"):
        pq.write_table(pa.table({"text": [name * 4]}), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match="b.parquet" + why):
        load_dataset(_config(tmp_path, max_record_bytes=150_000))
    with pytest.warns(UserWarning, match="1 files and records .*b.parquet" + why):
        data = load_dataset(_config(tmp_path, max_record_bytes=150_000, on_error="skip"))
    assert _texts(data.train) == ["aaaa", "cccc"]
    assert data.reports[0].num_skipped == 1


def test_an_empty_file_of_lines_is_an_error_or_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"b\.jsonl': an empty file"):
        load_dataset(_config(tmp_path))
    with pytest.warns(UserWarning, match=r"b\.jsonl': an empty file"):
        assert load_dataset(_config(tmp_path, on_error="skip")).reports[0].num_skipped == 1


@pytest.mark.parametrize("broken", [b"good\nbin\xff\xfeary", b"good\n\xe6\xbc", b"x" * ((1 << 20) - 1) + b"\n\xe6\x00"])
def test_a_binary_file_of_text_is_an_error_or_is_left_out_and_counted_where_tokens_are_not_bytes(
    tmp_path: Path, broken: bytes
) -> None:
    tokenizer = TokenizerConfig(file=train_tokenizer(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_bytes(b"the cat and the dog\n" * 60_000)
    (tmp_path / "b.txt").write_bytes(broken)
    (tmp_path / "c.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"b\.txt', line 2: not UTF-8 text"):
        load_dataset(_config(tmp_path, tokenizer=tokenizer))
    with pytest.warns(UserWarning, match=r"1 files and records .*b\.txt', line 2: not UTF-8"):
        data = load_dataset(_config(tmp_path, tokenizer=tokenizer, on_error="skip"))
    assert data.reports[0].num_documents == 1
    assert data.reports[0].num_empty == 1


def test_a_single_text_file_is_cut_between_characters_where_tokens_are_not_bytes(tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(file=train_tokenizer(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("漢" * 100 + "x")
    data = load_dataset(_config(tmp_path / "a.txt", tokenizer=tokenizer, held_out_fraction=0.1))
    assert data.held_out is not None
    # A byte is a token here, with an eos on each side; 30 of 301 bytes would cut a character of 3 through.
    assert data.held_out.num_tokens == 31 + 1
    assert data.train.num_tokens == 270 + 1


def test_a_source_of_which_nothing_can_be_used_is_an_error_with_the_first_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 3)
    with pytest.raises(
        ValueError, match=r"all of it was left out \(3 files and records\), the first .*line 1: not JSON"
    ):
        load_dataset(_config(path, on_error="skip"))


def test_too_little_text_is_an_error_after_the_warning_of_what_was_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"{\n")
    with (
        pytest.warns(UserWarning, match="1 files and records"),
        pytest.raises(ValueError, match=r"too little text .* 6 tokens"),
    ):
        load_dataset(_config(path, on_error="skip", sequence_length=64))


def test_what_was_left_out_is_an_error_for_a_later_run_that_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"{\n")
    for _ in range(2):
        with pytest.warns(UserWarning, match="line 2: not JSON"):
            load_dataset(_config(path, on_error="skip"))
    with pytest.raises(ValueError, match=r"cannot use .*a\.jsonl', line 2: not JSON"):
        load_dataset(_config(path))


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_progress_reaches_the_size_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    texts = [f"text {number} " * 100 for number in range(300)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "txt":
        path.write_text("".join(texts))
    elif suffix == "jsonl":
        write_lines(path, [{"text": text} for text in texts])
    else:
        pq.write_table(pa.table({"text": texts}), path)
    seen: list[int] = []

    @contextmanager
    def show(_: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        seen.append(-total_bytes)
        yield seen.append

    monkeypatch.setattr("recipes.data.tokens.show_progress", show)
    load_dataset(_config(path))
    assert sum(seen) == 0
    assert -seen[0] == path.stat().st_size
    assert len(seen) > 3


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("recipes.data.progress.time.monotonic", lambda: now_s[0])
    with show_progress("my text", 200_000_000) as advance:
        for later_s in (1.0, 31.0, 32.0, 62.0):
            now_s[0] = later_s
            advance(50_000_000)
    assert capsys.readouterr().err == "tokenising my text: 50% of 200 MB\ntokenising my text: 100% of 200 MB\n"


def test_progress_is_a_bar_on_a_terminal_unless_it_takes_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr("recipes.data.progress.time.monotonic", lambda: now_s)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for duration_s in (0.5, 5.0):
        with show_progress("my [bold]text", 100) as advance:
            now_s += duration_s
            advance(50)
        assert ("tokenising my [bold]text" in capsys.readouterr().err) == (duration_s > 1)


def test_good_data_give_no_warning_and_full_counts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "good"}] * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (report,) = load_dataset(_config(path)).reports
    assert (report.source, report.num_documents, report.num_tokens, report.num_skipped) == (path, 3, 3 * 6, 0)
    assert report.first_skipped == ""


def test_a_missing_pyarrow_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    for name in ("pyarrow", "pyarrow.lib", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"needs the package pyarrow; pip install 'meshwright\[recipes\]'"):
        load_dataset(_config(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "csv"),
        ("record", "poem"),
        ("chat_template", "mine"),
        ("on_error", "ignore"),
        ("text_field", ""),
        ("max_record_bytes", 0),
        ("cache", " "),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        DataConfig(**{field: value})  # type: ignore[arg-type]


def test_numbers_that_json_allows_do_not_matter_where_they_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "good", "score": math.nan, "size": 10**400}) + "\n")
    assert _texts(load_dataset(_config(path)).train) == ["good"]
