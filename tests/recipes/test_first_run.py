"""The first run: both legs, their table, and the folder that it clears."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recipes.first_run
from recipes.first_run import FirstRun, first_run
from tests.recipes.small_recipe import write_recipe_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Folder, output and errors of a first run over what an earlier one left."""
    folder = tmp_path_factory.mktemp("first")
    recipe = write_recipe_file(folder)
    out = folder / "out"
    (out / "checkpoints" / "step-00000099").mkdir(parents=True)
    (out / "metrics.jsonl").write_text("of an earlier run")
    words = ["--recipe", str(recipe), "--steps", "5", "--switch-step", "3", "--folder", str(out), "--nproc", "2"]
    process = subprocess.run(
        [sys.executable, "-m", "recipes.first_run", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    return out, process.stdout, process.stderr


def test_both_legs_are_in_the_table_and_the_second_goes_on_where_the_first_stopped(
    done: tuple[Path, str, str],
) -> None:
    _, out, err = done
    assert err == ""
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in out.splitlines() if re.match("│ fsdp2 full_shard.* to ", line)]
    assert [row[:2] for row in rows] == [
        ["fsdp2 full_shard, dp_shard 2", "0 to 3"],
        ["fsdp2 full_shard, tp 2", "3 to 5"],
    ]
    for row in rows:
        assert float(row[2]) > float(row[3]) > 0
        assert re.fullmatch(r"[\d,]+", row[5])
        assert row[6].endswith("MiB")
    assert (rows[0][7], rows[1][7].endswith(" s")) == ("-", True)


def test_entropies_and_a_sample_are_printed(done: tuple[Path, str, str]) -> None:
    _, out, _ = done
    found = re.search(r"unigram entropy ([\d.]+), bigram entropy ([\d.]+) nats a byte; held-out loss ([\d.]+)", out)
    assert found
    unigram, bigram, _ = map(float, found.groups())
    assert unigram > bigram > 0
    assert "def " in out.split(" a sample ")[1]


def test_an_earlier_first_run_is_cleared_away(done: tuple[Path, str, str]) -> None:
    folder, _, _ = done
    assert sorted(each.name for each in folder.iterdir()) == [".lock", "checkpoints", "metrics.jsonl"]
    assert [each.name for each in sorted((folder / "checkpoints").iterdir())] == ["step-00000003", "step-00000005"]
    assert "earlier" not in (folder / "metrics.jsonl").read_text()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit) as end:
        recipes.first_run.main(["--folder", str(tmp_path), "--nproc", "2"])
    assert end.value.code == 1
    assert "holds thesis.tex, which no first run wrote" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoints", "thesis.tex"]


def test_a_switch_outside_the_run_is_refused(tmp_path: Path) -> None:
    for switch_step in (0, 5):
        with pytest.raises(ValueError, match=f"switch_step={switch_step} must lie within the 5 steps"):
            first_run(FirstRun(steps=5, switch_step=switch_step, folder=str(tmp_path), nproc=2))


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        first_run(FirstRun(folder=str(tmp_path / "file"), nproc=2))
    assert (tmp_path / "file").exists()
