"""The commands as processes: launched, killed, interrupted, and what they leave behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint import latest
from recipes.messages import STOPPED
from recipes.signals import REPEAT_S
from tests.recipes.small_recipe import write_recipe_file

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LONG = ("--training.steps", "100000", "--output.save-every", "2", "--output.log-every", "1")


class Command:
    """A command in a session of its own, so that whatever outlives it can be found."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_until_it_has_saved(self) -> str:
        """Returns the lines up to the one that says so."""
        seen = ""
        while "saved" not in seen:
            line = self.process.stdout.readline() if self.process.stdout else ""
            assert line, f"ended before it saved: {seen}{self.process.stderr.read() if self.process.stderr else ''}"
            seen += line
        return seen

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in the order in which they started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return sorted(int(each) for each in children.split())

    def finish(self) -> tuple[int, str, str]:
        """Exit code, output and errors; no process may outlive the command, nor a temporary file."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        assert self.is_gone(), "a process outlived the command"
        # torch makes one cache for all its processes, which stays.
        assert [each.name for each in self.temporary.iterdir() if not each.name.startswith("torchinductor")] == []
        return self.process.returncode, out, err

    def is_gone(self) -> bool:
        """Whether all processes of the session have ended, after a moment."""
        for _ in range(50):
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.1)
        return False


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe_file(tmp_path_factory.mktemp("recipe")))


@pytest.fixture
def started(tmp_path: Path, recipe_file: str) -> Iterator[Command]:
    """A run that has saved once and would go on for long."""
    command = Command(tmp_path, "recipes.train", recipe_file, "--nproc", "2", *LONG, *_output(tmp_path))
    try:
        command.wait_until_it_has_saved()
        yield command
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)


def _output(folder: Path) -> tuple[str, str]:
    return "--output.folder", str(folder / "out")


def test_a_killed_rank_is_named_within_seconds_and_the_run_goes_on_from_its_checkpoint(
    started: Command, tmp_path: Path, recipe_file: str
) -> None:
    ranks = started.ranks()
    assert len(ranks) == 2
    start_s = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    code, _, err = started.finish()
    assert time.monotonic() - start_s < 20
    assert code == 1
    assert err == "error: rank 1 was ended by SIGKILL; where nobody sent it, the machine ran out of memory\n"

    saved = latest(tmp_path / "out" / "checkpoints")
    assert saved is not None
    steps = ("--training.steps", "100000", "--training.stop-at", str(int(saved.name.removeprefix("step-")) + 1))
    layout = ("--nproc", "2", "--parallel.tp", "2")
    code, out, err = Command(tmp_path, "recipes.train", recipe_file, *layout, *steps, *_output(tmp_path)).finish()
    # Not a word of groups that were not destroyed or functions that will go.
    assert (code, err) == (0, "")
    assert f"from {saved}" in out
    assert latest(tmp_path / "out" / "checkpoints") != saved


def test_ctrl_c_saves_and_ends_with_the_code_that_says_so(started: Command, tmp_path: Path) -> None:
    # As a terminal does, which sends the signal to the ranks too: the launcher's is no second one.
    os.killpg(started.process.pid, signal.SIGINT)
    code, out, err = started.finish()
    assert (code, err) == (STOPPED, "")
    step = re.search(r"stopped by SIGINT after step (\d+), which is saved; the same command goes on\n$", out)
    assert step
    assert latest(tmp_path / "out" / "checkpoints") == tmp_path / "out" / "checkpoints" / f"step-{int(step[1]):08d}"


@pytest.mark.slow
def test_a_signal_to_the_launcher_alone_reaches_the_ranks(started: Command) -> None:
    started.process.send_signal(signal.SIGUSR1)
    code, out, err = started.finish()
    assert (code, err) == (STOPPED, "")
    assert "stopped by SIGUSR1 after step" in out


@pytest.mark.slow
@pytest.mark.parametrize("to_one_rank", [False, True], ids=["launcher", "one rank"])
def test_a_signal_before_the_first_step_leaves_nothing_and_ends_with_the_same_code(
    to_one_rank: bool, tmp_path: Path, recipe_file: str
) -> None:
    command = Command(tmp_path, "recipes.train", recipe_file, "--nproc", "2", *LONG, *_output(tmp_path))
    while len(command.ranks()) < 2:
        assert command.process.poll() is None
        time.sleep(0.01)
    os.kill(command.ranks()[1] if to_one_rank else command.process.pid, signal.SIGTERM)
    code, _, err = command.finish()
    assert (code, err) == (
        STOPPED,
        "stopped by SIGTERM outside of training steps: nothing more was saved; run again to go on\n",
    )
    assert latest(tmp_path / "out" / "checkpoints") is None


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_that_hangs(started: Command) -> None:
    # A rank that stands still is one that no step comes to an end with.
    os.kill(started.ranks()[1], signal.SIGSTOP)
    os.killpg(started.process.pid, signal.SIGINT)
    time.sleep(REPEAT_S + 0.5)
    assert started.process.poll() is None
    os.killpg(started.process.pid, signal.SIGINT)
    code, _, err = started.finish()
    assert (code, err) == (130, "stopped by SIGINT\n")


@pytest.mark.slow
def test_no_rank_outlives_a_killed_launcher(started: Command) -> None:
    started.process.kill()
    started.process.communicate(timeout=TIMEOUT_S)
    assert started.is_gone()


def test_a_failure_of_one_rank_is_one_message_below_its_traceback_with_debug(tmp_path: Path, recipe_file: str) -> None:
    (tmp_path / "out").write_text("")
    words = ("--nproc", "2", "--debug", *_output(tmp_path))
    code, _, err = Command(tmp_path, "recipes.train", recipe_file, *words).finish()
    assert code == 1
    assert "Traceback (most recent call last)" in err
    # Without --debug this line is all, as it is for a killed rank above.
    assert re.fullmatch(r"error: could not use .*/out: .*", err.splitlines()[-1])
    assert err.count("error: ") == 1


def test_torchrun_starts_the_command_and_its_failure_is_one_message_of_ours(tmp_path: Path, recipe_file: str) -> None:
    # Alone: else both would meet at torchrun's usual port.
    alone = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    torchrun = (*alone, "-m", "recipes.train", recipe_file)
    (tmp_path / "bad").mkdir()
    good = Command(tmp_path, *torchrun, "--training.stop-at", "2", *_output(tmp_path))
    bad = Command(tmp_path / "bad", *torchrun, "--data.source", "/no/such/text", *_output(tmp_path / "bad"))
    out, err = good.process.communicate(timeout=TIMEOUT_S)
    assert good.process.returncode == 0, err
    assert out.count("from scratch") == 1
    assert "Warning" not in err
    out, err = bad.process.communicate(timeout=TIMEOUT_S)
    assert bad.process.returncode != 0
    assert err.count("error: no such file or folder: '/no/such/text'") == 1
    # The rest is torchrun's own.
    assert re.findall("^error: ", out + err, re.MULTILINE) == ["error: "]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_survived_through_a_restart_by_torchrun(tmp_path: Path, recipe_file: str) -> None:
    words = ("--standalone", "--nproc_per_node", "2", "--max_restarts", "1", "-m", "recipes.train", recipe_file)
    command = Command(tmp_path, "torch.distributed.run", *words, *LONG, *_output(tmp_path))
    try:
        command.wait_until_it_has_saved()
        os.kill(command.ranks()[1], signal.SIGKILL)
        lines = command.wait_until_it_has_saved()
        assert re.search(r"from .*/step-\d{8}: step \d+, .* tokens seen", lines)
        command.process.send_signal(signal.SIGTERM)
        # The agent sends it on; its own exit code, and files that it leaves behind, are not ours to choose.
        out, _ = command.process.communicate(timeout=TIMEOUT_S)
        assert "stopped by SIGTERM after step" in out
        assert command.is_gone()
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
