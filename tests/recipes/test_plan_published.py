"""Predictions against published results; `python -m recipes.plan --rows published` prints every row."""

import json
from pathlib import Path

import pytest

from parallel.planner.constants import CONSTANTS, FITTED
from recipes.plan.__main__ import main
from recipes.plan.fit import fit, loss, without_source
from recipes.plan.published import errors, read_rows, summary

ROWS = read_rows()
SOURCES = sorted({row.source for row in ROWS})
HEAD = (
    "source,model,num_gpus,gpu,dp_replicate,dp_shard,tp,cp,pp,schedule,seq_len,local_batch,grad_accum,"
    "activation_checkpoint,compile,matmul_dtype,async_tp,tokens_per_s_per_gpu,memory_gib,mfu_percent\n"
)


def test_median_errors_are_below_5_percent_for_memory_and_10_for_speed() -> None:
    speed, _, memory, _ = summary([errors(row) for row in ROWS])
    assert speed < 0.03
    assert memory is not None and memory < 0.04


def test_one_row_alone_is_off_by_more_than_9_percent() -> None:
    # 8B on two nodes with tp 4: its source does not say how it splits activations there.
    found = [errors(row) for row in ROWS]
    off = [each.row.name for each in found if max(abs(each.speed_error), abs(each.memory_error or 0.0)) > 0.09]
    assert off == ["llama-8.03b on 8 tp 4 compiled"]
    _, worst, _, worst_memory = summary(found)
    assert worst < 0.21
    assert worst_memory is not None and worst_memory < 0.35


def test_the_constants_are_those_that_fit_the_rows_best() -> None:
    found = fit(ROWS)
    assert loss(ROWS, CONSTANTS) - loss(ROWS, found) < 0.002
    for name in FITTED:
        assert getattr(CONSTANTS, name) == pytest.approx(getattr(found, name), rel=0.03)


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_left_out_of_the_fit_is_predicted_too(source: str) -> None:
    speed, _, memory, _ = summary(without_source(ROWS, source))
    assert speed < 0.1
    assert memory is None or memory < 0.1


def test_every_row_of_a_users_table_gets_its_errors_and_what_no_row_checks_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        HEAD
        + "mine,llama3.1-405b,512,h100-80gb,1,8,8,1,8,Interleaved 1F1B,8192,32,1,full,yes,float8,no,100,80,\n"
        + "mine,gpt-175b,64,a100-80gb,1,64,1,1,1,,2048,1,1,full,no,bf16,no,120,,\n"
    )
    main(["--rows", str(path), "--json"])
    values = json.loads(capsys.readouterr().out)
    assert [each["unvalidated"] for each in values["rows"]] == [["pp", "matmul_dtype float8"], []]
    assert values["rows"][0]["speed_error"] == pytest.approx(values["rows"][0]["tokens_per_s_per_gpu"] / 100 - 1)
    assert "left_out" not in values


def test_the_shipped_rows_are_also_predicted_with_their_source_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "published"])
    printed = capsys.readouterr().out
    assert printed.count("llm-foundry readme: mpt-7b on 8") == 2
    assert printed.count("median") == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mine,llama9,8,h100-80gb,1,8,1,1,1,,2048,1,1,full,no,bf16,no,1,,", "line 2 .*unknown model 'llama9'"),
        ("mine,mpt-7b,8,h100-80gb,1,8,1,1,2,spiral,2048,1,1,full,no,bf16,no,1,,", "line 2 .*unknown schedule 'spiral'"),
        ("mine,mpt-7b", "line 2"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HEAD + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_rows(str(path))
