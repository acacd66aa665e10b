"""Only a backend's own file and the tables know it by name: everything else asks what it can do."""

import ast
from collections.abc import Iterator
from pathlib import Path

from parallel.parallelize import BACKENDS
from parallel.traits import TRAITS

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("parallel", "models", "checkpoint", "recipes") for path in (ROOT / folder).rglob("*.py")]
FILES = {"dp": "data_parallel", **{name: name for name in ("none", "ddp", "zero1", "fsdp1", "fsdp2")}}


def texts(node: ast.AST) -> set[object]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}


def words(node: ast.AST) -> set[str]:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def decisions(tree: ast.AST) -> Iterator[int]:
    """Lines that choose by the name of a backend."""
    for node in ast.walk(tree):
        subject = node.subject if isinstance(node, ast.Match) else node
        if not isinstance(node, ast.Compare | ast.Match):
            continue
        # `none` and `dp` are words for other things too.
        asks = bool(words(subject) & {"data_parallel", "backend"})
        if texts(node) & (BACKENDS.keys() if asks else BACKENDS.keys() - {"none", "dp"}):
            yield node.lineno


def imported(tree: ast.AST) -> set[str]:
    froms = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return froms | {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}


def test_the_two_tables_and_the_files_are_of_the_same_backends() -> None:
    assert BACKENDS.keys() == TRAITS.keys() == FILES.keys()
    assert all((ROOT / "parallel" / f"{name}.py").exists() for name in FILES.values())


def test_nothing_decides_by_the_name_of_a_backend() -> None:
    own = {f"{name}.py" for name in FILES.values()}
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        if path.parent.name != "parallel" or path.name not in own
        for line in decisions(ast.parse(path.read_text()))
    }
    assert found == set()


def test_a_decision_by_name_would_be_seen() -> None:
    for code in (
        "if config.data_parallel == 'none': pass",
        "if backend in ('dp', 'x'): pass",
        "y = 1 if kind != 'fsdp1' else 2",
        "match config.data_parallel:\n    case 'ddp': pass",
    ):
        assert list(decisions(ast.parse(code))) == [1]
    assert list(decisions(ast.parse("if view == 'dp' or x is None: pass"))) == []


def test_only_the_table_and_backends_import_backends() -> None:
    modules = {f"parallel.{name}" for name in FILES.values()}
    users = {path.relative_to(ROOT).as_posix() for path in SOURCES if imported(ast.parse(path.read_text())) & modules}
    assert users <= {"parallel/parallelize.py", *(f"parallel/{name}.py" for name in FILES.values())}
