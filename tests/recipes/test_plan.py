import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from parallel.planner.candidate import Request
from parallel.planner.hardware import find_gpu
from parallel.planner.search import search
from recipes.dry_run import dry_run
from recipes.find import find_recipe
from recipes.plan.__main__ import NOTHING_FITS, main
from recipes.plan.recipe_file import plan_recipe
from tests.parallel.planner.test_search import everything, request

SMALL = ["debug", "--gpus", "4", "--gpu", "a100-40gb", "--seq", "64", "--global-batch", "16"]


def test_the_command_shows_plans_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    main(["llama3.1-70b", "--gpus", "256", "--gpu", "h100-80gb", "--seq", "8192", "--global-batch", "512"])
    printed = capsys.readouterr().out
    for words in ("71.19 GiB of 79.10 GiB may be used", "what binds: matrix products", "why the second is behind"):
        assert words in printed
    assert "dp_shard 256" in printed


def test_json_holds_the_layouts_and_their_parts(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--json"])
    values = json.loads(capsys.readouterr().out)
    best = values["plans"][0]
    assert sum(best["time"].values()) == pytest.approx(best["step_time_s"])
    assert best["micro_batch"] * best["num_micro_batches"] * 4 >= 16
    assert values["state_bytes"].keys() == {"classic", "stored"}


def test_the_recipe_that_is_written_is_one_that_train_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planned.py"
    main([*SMALL, "--recipe", str(path)])
    recipe = find_recipe(str(path))
    recipe.check(4)
    plan = search(
        Request(shape=recipe.model.shape, gpu=find_gpu("a100-40gb"), num_gpus=4, sequence_length=64, global_batch=16),
        most=5,
    ).plans[0]
    assert recipe == plan_recipe("debug", plan)


def test_200_random_plans_within_8_ranks_build() -> None:
    generator = random.Random(0)
    for gpus, count in ((2, 40), (4, 60), (8, 100)):
        asked = replace(request("debug", gpus, batch=16, length=64, gpu="a100-40gb"), compile=False)
        for plan in generator.sample(everything(asked), count):
            assert dry_run(plan_recipe("debug", plan), gpus).parameter_bytes > 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["llama3.1-70b", "--gpus", "8", "--gpu", "h100-80gb"], NOTHING_FITS, "bytes more than the"),
        (["llama3.1-70b", "--gpus", "8", "--gpu", "h100"], 1, "unknown GPU 'h100'"),
        (["llama9", "--gpus", "8", "--gpu", "h100-80gb"], 1, "unknown preset 'llama9'"),
        ([*SMALL, "--recipe", "plan.txt"], 1, "must end in .py"),
    ],
)
def test_what_cannot_be_planned_ends_with_one_message_and_its_exit_code(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code
    assert message in capsys.readouterr().err
