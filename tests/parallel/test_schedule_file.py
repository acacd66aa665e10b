"""A pipeline runs by a table of the user's, and what could not come to its end is refused."""

import re
from pathlib import Path

import pytest

from parallel import ParallelConfig
from parallel.layout import check_layout, resolve
from parallel.schedule_file import ScheduleFile, read_schedule
from parallel.schedules import check_micro_batches
from tests.parallel.layout_rows import DENSE
from tests.parallel.test_pipeline_parallel import assert_parity

# Each rank's second stage comes in reverse order, and some backwards are computed in halves, late.
V_SHAPED = """
0F0,0F1,3F0,3I0,0F2,3F1,3W0,3B1,0B0,0F3,3F2,3B2,0B1,3F3,3I3,3W3,0I2,0I3,0W2,0W3
1F0,2F0,1F1,2F1,,2B0,1F2,1B0,2F2,2B1,1F3,1I1,2F3,2B2,1B2,2I3,1B3,2W3,1W1
"""
# The first rank has one stage, the other two.
UNEVEN = """
0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3
1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1,1F2,2F2,2B2,1B2,1F3,2F3,2B3,1B3
"""


def written(path: Path, text: str) -> str:
    path.write_text(text.strip() + "\n")
    return str(path)


@pytest.mark.parametrize("text", [V_SHAPED, UNEVEN], ids=["v-shaped", "uneven"])
def test_a_schedule_from_a_file_equals_one_process(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "schedule.csv", text)
    assert_parity(2, {"pp": 2, "schedule": "csv", "schedule_file": path})


@pytest.mark.slow
def test_a_schedule_from_a_file_composes_with_full_shard_and_tied_embeddings(tmp_path: Path) -> None:
    path = written(tmp_path / "schedule.csv", V_SHAPED)
    assert_parity(4, {"pp": 2, "schedule": "csv", "schedule_file": path, "dp_shard": 2}, tied=True)


def test_a_file_says_where_stages_are_and_how_many_micro_batches_a_step_has(tmp_path: Path) -> None:
    path = written(tmp_path / "schedule.csv", V_SHAPED)
    assert read_schedule(path) == ScheduleFile(ranks=(0, 1, 1, 0), num_micro_batches=4, splits_backward=True)
    path = written(tmp_path / "schedule.csv", "0F0,(0B0;0F1)OVERLAP_F_B,0B1")
    assert read_schedule(path) == ScheduleFile(ranks=(0,), num_micro_batches=2, splits_backward=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rank 0 (row 1) does nothing"),
        ("0F0,0B0\n,,", "rank 1 (row 2) does nothing"),
        ("0F0,0X0", "row 1, column 2: '0X0' is no stage, kind (F, B, I or W) and micro-batch"),
        ("0F0,(0B0)OVERLAP_F_B", "row 1, column 2: '(0B0)OVERLAP_F_B' is no stage"),
        ("0F0,0B0,0F0", "0F0 stands there twice"),
        ("0F0,0B0,0F1", "stage 0 does ['F'] for micro-batch 1 of 2; it needs F and B, or F, I and W"),
        ("0F0,0B0,0I0,0W0", "stage 0 does ['B', 'F', 'I', 'W'] for micro-batch 0 of 1"),
        ("0F0,0B0\n1F0,0B1", "stage 0 is on ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0", "no rank runs stages [1]"),
        ("0F0,0B0\n1B0,1F0", "wait for each other for ever: rank 0 before 0B0, rank 1 before 1B0"),
        ("0F0,0W0,0I0", "wait for each other for ever: rank 0 before 0W0"),
        ("0F0,0B0,0F999999999", "is no stage"),
    ],
)
def test_a_table_that_ranks_cannot_follow_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_schedule(written(tmp_path / "schedule.csv", text))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("none.csv", "bytes.csv", "."):
        with pytest.raises(ValueError, match=r"cannot be read: .*; give schedule_file a CSV file"):
            read_schedule(str(tmp_path / name))


def test_a_file_is_held_against_the_layout_and_the_step(tmp_path: Path) -> None:
    path = written(tmp_path / "schedule.csv", V_SHAPED)

    def check(**fields: object) -> None:
        config = ParallelConfig(pp=2, schedule="csv", schedule_file=path, **fields)  # type: ignore[arg-type]
        check_layout(resolve(config, 2), DENSE, num_micro_batches=4)

    check()
    check(stages=(1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"stages=\(2, 2\) are 2, but .* has 4"):
        check(stages=(2, 2))
    with pytest.raises(ValueError, match="goes backward through each block twice"):
        check(compile=True)
    with pytest.raises(ValueError, match="has rows for 2 ranks, but pp=4"):
        config = ParallelConfig(pp=4, schedule="csv", schedule_file=path)
        check_layout(resolve(config, 4), DENSE)
    with pytest.raises(ValueError, match=r"a step has 3 micro-batches, but .* is a schedule of 4"):
        check_micro_batches(ParallelConfig(pp=2, schedule="csv", schedule_file=path), 3)


def test_a_file_and_its_schedule_go_together() -> None:
    with pytest.raises(ValueError, match="a file goes with schedule='csv', which needs one"):
        ParallelConfig(pp=2, schedule="csv")
    with pytest.raises(ValueError, match="a file goes with schedule='csv', which needs one"):
        ParallelConfig(pp=2, schedule="gpipe", schedule_file="mine.csv")
