"""Which files a source gives, and which of them are held out."""

import os
from pathlib import Path

import pytest

from recipes.data import DataConfig, load_dataset
from tests.recipes.data_stores import read_texts


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def _folder(root: Path, names: list[str]) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    return root


def _names(config: DataConfig) -> tuple[list[str], list[str]]:
    train, held_out = read_texts(config)
    return [name for name, _ in train], [name for name, _ in held_out]


def test_a_folder_is_read_recursively_sorted_and_without_hidden_folders(tmp_path: Path) -> None:
    _folder(tmp_path, ["b.txt", "a/z.txt", "a.txt", ".git/config.txt", "c.bin"])
    assert _names(DataConfig(source=str(tmp_path), held_out_fraction=0))[0] == ["a.txt", "a/z.txt", "b.txt"]


def test_patterns_choose_the_files(tmp_path: Path) -> None:
    _folder(tmp_path, ["a.txt", "b.log", "sub/c.log", "sub/d.txt"])
    assert _names(DataConfig(source=str(tmp_path), patterns=("*.log",), held_out_fraction=0))[0] == [
        "b.log",
        "sub/c.log",
    ]
    assert len(_names(DataConfig(source=str(tmp_path), patterns=("*",), held_out_fraction=0))[0]) == 4


def test_a_linked_folder_is_read_once_even_where_links_form_a_circle(tmp_path: Path) -> None:
    _folder(tmp_path / "data", ["a.txt"])
    _folder(tmp_path / "elsewhere", ["b.txt"])
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "linked_again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "data")
    config = DataConfig(source=str(tmp_path / "data"), held_out_fraction=0)
    assert _names(config)[0] == ["a.txt", "linked/b.txt"]


def test_held_out_files_are_chosen_by_name_alone(tmp_path: Path) -> None:
    names = [f"{number}.txt" for number in range(200)]
    config = DataConfig(source=str(_folder(tmp_path / "one", names)), held_out_fraction=0.2)
    train, held_out = _names(config)
    assert sorted(train + held_out) == sorted(names)
    assert 25 <= len(held_out) <= 55
    other = _folder(tmp_path / "two", [*names, *(f"more/{number}.txt" for number in range(100))])
    of_other = _names(DataConfig(source=str(other), held_out_fraction=0.2, seed=5))[1]
    assert [name for name in of_other if not name.startswith("more/")] == held_out


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_a_folder_of_two_files_trains_on_one_and_holds_out_the_other(tmp_path: Path, fraction: float) -> None:
    config = DataConfig(source=str(_folder(tmp_path, ["a.txt", "b.txt"])), held_out_fraction=fraction)
    train, held_out = _names(config)
    assert len(train) == len(held_out) == 1
    assert train != held_out


def test_the_last_part_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "only.dat"
    path.write_bytes(bytes(range(200)))
    train, held_out = read_texts(DataConfig(source=str(path), held_out_fraction=0.1))
    assert train == [("only.dat", bytes(range(180)))]
    assert held_out == [("only.dat", bytes(range(180, 200)))]


def test_files_without_text_are_left_out(tmp_path: Path) -> None:
    _folder(tmp_path, ["a.txt"])
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text(" \n")
    assert _names(DataConfig(source=str(tmp_path), held_out_fraction=0))[0] == ["a.txt"]


def test_the_standard_library_is_source_without_tests_and_packages() -> None:
    train, held_out = _names(DataConfig())
    assert "argparse.py" in train + held_out
    assert len(train) > 300
    assert held_out
    assert not [name for name in train + held_out if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert all(name.endswith(".py") for name in train + held_out)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file or folder: .*nowhere"):
        load_dataset(DataConfig(source=str(tmp_path / "nowhere")))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no files"):
        load_dataset(DataConfig(source=str(tmp_path)))


def test_a_folder_where_nothing_matches_is_refused_with_the_patterns(tmp_path: Path) -> None:
    _folder(tmp_path, ["a.json"])
    with pytest.raises(ValueError, match=r"none of the 1 files .* matches \*\.txt .*'a\.json'"):
        load_dataset(DataConfig(source=str(tmp_path)))


def test_files_without_any_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(ValueError, match="all of them empty"):
        load_dataset(DataConfig(source=str(tmp_path)))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    _folder(tmp_path, ["a.txt"])
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"cannot read .*b\.txt.*No such file"):
        load_dataset(DataConfig(source=str(tmp_path)))


def test_a_pipe_among_the_files_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    _folder(tmp_path, ["a.txt"])
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(ValueError, match=r"b\.txt.*not a regular file"):
        load_dataset(DataConfig(source=str(tmp_path)))


def test_a_source_that_is_neither_file_nor_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a regular file nor a folder"):
        load_dataset(DataConfig(source=os.devnull))


def test_text_shorter_than_one_sequence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 30)
    assert load_dataset(DataConfig(source=str(path), held_out_fraction=0, sequence_length=31)).train.num_samples == 1
    with pytest.raises(ValueError, match=r"too little text .*32 tokens .*sequence_length=32"):
        load_dataset(DataConfig(source=str(path), held_out_fraction=0, sequence_length=32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", ""),
        ("patterns", ()),
        ("held_out_fraction", 1.0),
        ("held_out_fraction", -0.1),
        ("held_out_fraction", float("nan")),
        ("sequence_length", 0),
        ("sequence_length", 16.0),
        ("seed", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field.replace("_", ".")):
        DataConfig(**{field: value})  # type: ignore[arg-type]
