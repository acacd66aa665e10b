import json
from pathlib import Path

import pytest

from parallel.planner.scaling import scale
from parallel.planner.search import search
from recipes.find import find_recipe
from recipes.plan.__main__ import NOTHING_FITS, main
from recipes.plan.command import PlanCommand
from recipes.plan.recipe_file import plan_recipe
from recipes.plan.report import show_curves

SMALL = ["debug", "--gpus", "4", "--gpu", "a100-40gb", "--seq", "64", "--global-batch", "16"]


def test_the_command_shows_plans_says_why_and_walks_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3.1-70b", "--gpus", "256", "--gpu", "h100-80gb", "--seq", "8192", "--global-batch", "512"]
    main([*words, "--explain"])
    printed = capsys.readouterr().out
    for part in (
        "71.19 GiB of 79.10 GiB may be used",
        "what binds: matrix products",
        "peak of the best, backward: parameters 1.03 GiB, gradients",
        "predictions for GPUs were speed within 2.6% of published results in the median, 20% at worst, memory 3.6% and "
        "34%",
        "why the second is behind: 0.972 s more of traffic of tp",
        "1     sent for parameters and gradients  1039.43 GiB  1039.43 GiB  +0.00%",
        "* unvalidated: no published result checks what context parallel sends",
        "is it only a little short, so that sharded gradients and optimizer state help? no: shard_grad_op: 184.22 GiB",
        "the planner agrees with full_shard",
    ):
        assert part in printed
    assert "dp_shard 256" in printed


def test_json_holds_the_layouts_their_parts_the_guide_and_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*SMALL, "--json", "--explain", "--scaling", str(tmp_path / "scaling.png")])
    values = json.loads(capsys.readouterr().out)
    best = values["plans"][0]
    assert sum(best["time"].values()) == pytest.approx(best["step_time_s"])
    assert best["micro_batch"] * best["num_micro_batches"] * 4 >= 16
    assert values["state_bytes"].keys() == {"classic", "stored"}
    assert values["guide"]["answers"][0]["is_yes"]
    assert {curve["name"] for curve in values["scaling"]} >= {"ddp", "full_shard"}
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_why_the_second_is_behind_is_said_where_only_the_best_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--top", "1"])
    assert "why the second is behind" in capsys.readouterr().out
    main([*SMALL, "--top", "1", "--json"])
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 1


def test_a_picture_of_the_frontier_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--frontier", str(tmp_path / "new" / "frontier.png")])
    assert (tmp_path / "new" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert f"wrote {tmp_path / 'new' / 'frontier.png'}" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["debug", "moe-debug"])
def test_the_recipe_that_is_written_is_one_that_train_accepts(model: str, tmp_path: Path) -> None:
    path = tmp_path / "planned.py"
    words = [model, *SMALL[1:]]
    main([*words, "--write", str(path)])
    recipe = find_recipe(str(path))
    recipe.check(4)
    command = PlanCommand(model=model, gpus=4, gpu="a100-40gb", seq=64, global_batch=16)
    assert recipe == plan_recipe(model, search(command.request(), most=5).plans[0])


def test_shapes_that_only_published_results_use_are_planned_for_but_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["mpt-7b", "--gpus", "8", "--seq", "2048", "--global-batch", "64"]
    main(words)
    assert "what binds" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main([*words, "--write", str(tmp_path / "planned.py")])
    assert end.value.code == 1
    assert "'mpt-7b' is only a shape, which can be planned for but not trained" in capsys.readouterr().err


def test_the_point_where_latency_bends_scaling_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show_curves(scale(search(PlanCommand(model="debug", gpus=4, seq=64, global_batch=16).request()).plans[0], 64))
    assert "ddp: latency of rings costs 5% of the speed" in capsys.readouterr().out


def test_claims_are_printed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--claims"])
    printed = capsys.readouterr().out
    assert printed.startswith("| tutorials say |")
    assert "16P/N is 140 GB a GPU" in printed
    main(["--claims", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 5 and all(f"| {each['claim']} |" in printed for each in rows)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["llama3.1-405b", "--gpus", "8", "--gpu", "h100-80gb"], NOTHING_FITS, "bytes more than the"),
        (["llama3.1-8b", "--gpus", "37", "--global-batch", "64"], NOTHING_FITS, "nearest that works: 36 GPUs"),
        (["llama3.1-70b", "--gpus", "8", "--gpu", "h100"], 1, "unknown GPU 'h100'"),
        (["llama9", "--gpus", "8", "--gpu", "h100-80gb"], 1, "unknown model 'llama9'"),
        ([], 1, "name a model and a number of GPUs"),
        (["llama3.1-8b"], 1, "gpus=0 must be from 1 to 131,072: say --gpus N"),
        (["llama3.1-70b", "--gpus", "10000000"], 1, "gpus=10000000 must be from 1 to 131,072"),
        ([*SMALL, "--write", "/nowhere/plan.py"], 1, "there is no such folder"),
        ([*SMALL, "--write", "plan.txt"], 1, "must end in .py"),
        ([*SMALL, "--frontier", "plan.txt"], 1, "must end in .png"),
        ([*SMALL, "--tune", "1"], 1, "but they are for 4"),
    ],
)
def test_what_cannot_be_planned_ends_with_one_message_and_its_exit_code(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code
    assert message in capsys.readouterr().err


def test_a_request_says_its_dtype_and_what_is_frozen() -> None:
    asked = PlanCommand(model="llama3.1-8b", gpus=2, compute="float8", frozen=0.99).request()
    assert (asked.compute, asked.frozen) == ("float8", 0.99)
    assert PlanCommand(model="llama3.1-8b", gpus=2).request().compute == "bfloat16"
    with pytest.raises(ValueError, match="recipes of plans train all parameters"):
        PlanCommand(model="llama3.1-8b", gpus=2, frozen=0.99, write="x.py").check()
