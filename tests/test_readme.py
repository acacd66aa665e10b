"""What the README shows works."""

import os
import re
import subprocess
import sys
from pathlib import Path

from recipes.find import FAMILIES, find_recipe, recipe_names

ROOT = Path(__file__).parents[1]


def test_the_library_example_trains_saves_and_loads_on_four_ranks(tmp_path: Path) -> None:
    match = re.search(r"<!-- example -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert match is not None
    (tmp_path / "example.py").write_text(match[1])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4", "example.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss \d\.\d{4}, gradient norm \d\.\d{4}\n", done.stdout), done.stdout
    assert (tmp_path / "checkpoints" / "step-00000010" / "manifest.json").is_file()


def test_the_recipe_file_of_the_readme_makes_a_recipe_that_fits_two_ranks(tmp_path: Path) -> None:
    match = re.search(r"```python\n(# my_recipe\.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert match is not None
    (tmp_path / "my_recipe.py").write_text(match[1])
    find_recipe(str(tmp_path / "my_recipe.py")).check(2)


def test_every_recipe_that_the_readme_names_is_there() -> None:
    readme = (ROOT / "README.md").read_text()
    assert set(recipe_names()) == set(re.findall(rf"`((?:{'|'.join(FAMILIES)})\w+)`", readme))


def test_every_command_of_the_readme_names_a_module_that_is_there() -> None:
    for module in re.findall(r"-m (recipes\.\w+)", (ROOT / "README.md").read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
