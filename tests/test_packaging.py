"""What is installed, and what happens where a folder hides it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from parallel.shadowing import check_siblings

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("parallel", "models", "checkpoint", "recipes")
IMPORT_ALL = f"import {', '.join(PACKAGES)}; print(recipes.__file__)"


def _is_installed() -> bool:
    # A build leaves an egg-info in the checkout, which is no install: it has no record.
    return any(found.read_text("RECORD") for found in distributions(name="meshwright"))


needs_install = pytest.mark.skipif(not _is_installed(), reason="meshwright is not installed here, only checked out")


def _run(folder: Path, code: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs code as a user would in that folder, with `path` first among the installed ones."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the checkout so that no build output stays in it."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    copy = tmp_path_factory.mktemp("checkout")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = _run(copy, build)
    assert done.returncode == 0, done.stderr
    return copy / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what a regular install puts into site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_every_module_of_the_four_packages_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    kinds = ("*.py", "*.toml", "*.csv")
    found = {path for package in PACKAGES for kind in kinds for path in (ROOT / package).rglob(kind)}
    expected = {str(path.relative_to(ROOT)) for path in found}
    assert names == expected


def test_every_folder_with_modules_is_a_package() -> None:
    # Without __init__.py it works in a checkout and is missing from the wheel.
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@needs_install
def test_all_packages_import_from_an_unrelated_folder(tmp_path: Path) -> None:
    done = _run(tmp_path, IMPORT_ALL)
    assert done.returncode == 0, done.stderr


@needs_install
def test_folders_without_modules_hide_nothing_from_an_editable_install(tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
    done = _run(tmp_path, IMPORT_ALL)
    assert done.returncode == 0, done.stderr


def test_folders_without_modules_hide_nothing_from_a_regular_install(tmp_path: Path, unpacked: Path) -> None:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
    done = _run(tmp_path, IMPORT_ALL, unpacked)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(unpacked)


@pytest.mark.parametrize("name", ["models", "checkpoint"])
def test_recipes_say_which_package_of_the_user_shadows_ours(tmp_path: Path, unpacked: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    done = _run(tmp_path, "import parallel; print('parallel works'); import recipes", unpacked)
    assert done.stdout == "parallel works\n"
    assert f"`{name}` resolves to {tmp_path / name}, which shadows meshwright's own" in done.stderr.splitlines()[-1]


def test_recipes_say_which_module_of_the_user_shadows_ours(tmp_path: Path, unpacked: Path) -> None:
    (tmp_path / "models.py").touch()
    done = _run(tmp_path, "import recipes", unpacked)
    assert f"`models` resolves to {tmp_path / 'models.py'}, which shadows" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["models", "checkpoint", "recipes"])
def test_the_other_packages_say_when_parallel_is_shadowed(tmp_path: Path, unpacked: Path, name: str) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "__init__.py").touch()
    done = _run(tmp_path, f"import {name}", unpacked)
    shadow = tmp_path / "parallel" / "__init__.py"
    assert f"ImportError: `parallel` resolves to {shadow}, which shadows" in done.stderr.splitlines()[-1]


def test_a_missing_sibling_is_named() -> None:
    with pytest.raises(ImportError, match="`no_such_package` is missing"):
        check_siblings(("no_such_package",))


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "Makefile", ".ci/run"])
def test_set_up_names_no_host_and_no_folder_of_a_machine(name: str) -> None:
    of_a_machine = re.compile(
        r"://|index-url|find-links|trusted-host|(?<!\w)/(home|mnt|opt|root|srv|tmp|usr|work)/(?!bin/env)"
    )
    assert [line for line in (ROOT / name).read_text().splitlines() if of_a_machine.search(line)] == []


def test_constraints_pin_one_release_each_and_a_torch_that_the_project_claims() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    (pinned,) = (line.removeprefix("torch==") for line in lines if line.startswith("torch=="))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (claimed,) = (SpecifierSet(line.removeprefix("torch")) for line in dependencies if line.startswith("torch"))
    assert pinned in claimed
    # Only what the tests run on.
    assert "2.12.1" not in claimed
    assert "2.14.0" not in claimed
