"""The bench runs each comparison, prints medians, spread and ratios, and refuses what says nothing."""

import json
from pathlib import Path

import pytest

from models.llama import LlamaConfig
from recipes.bench import __main__ as bench
from recipes.bench import loops, model, startup
from recipes.bench.rounds import Comparison, interleave

TINY = LlamaConfig(num_layers=1, width=32, num_heads=4, num_kv_heads=2, feed_forward_width=48, vocab_size=64)
SMALL = LlamaConfig(num_layers=4, width=128, num_heads=4, num_kv_heads=2, feed_forward_width=344, vocab_size=2048)
# Beyond its aim, what a machine that does other things beside the tests may add to the median of a few rounds.
SLACK = 1.25


STEPS = ("full_shard", "replicated", "tensor_parallel")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forked ranks measure a model whose steps take milliseconds."""
    # Else each of them would import it at its first optimizer, which takes seconds.
    import torch._dynamo  # noqa: F401

    monkeypatch.setattr(loops, "MODEL", TINY)
    monkeypatch.setattr(loops.random_batch, "__defaults__", (2, 8, TINY.vocab_size))
    monkeypatch.setattr(model, "MODEL", TINY)
    monkeypatch.setattr(model, "LENGTH", 8)


@pytest.mark.parametrize("parts", [STEPS, pytest.param(("model",), marks=pytest.mark.slow)])
def test_every_comparison_of_steps_prints_its_contenders_and_writes_its_figures(
    parts: tuple[str, ...], tiny: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.main(["step", "--rounds", "2", "--parts", *parts, "--json", str(tmp_path / "figures.json")])
    printed = " ".join(capfd.readouterr().out.split())
    results = json.loads((tmp_path / "figures.json").read_text())
    assert len(results) == len(parts)
    for result in results:
        reference = next(iter(result["times_s"]))
        assert result["title"] in printed
        assert result["ratios"][reference] == 1
        for name, times_s in result["times_s"].items():
            assert name in printed
            assert len(times_s) == 2 and all(seconds > 0 for seconds in times_s)
        for name, aim in result["aims"].items():
            assert f"{result['ratios'][name]:.3f}" in printed
            assert f"<= {aim:.2f}" in printed
    assert "quartiles" in printed


@pytest.mark.slow
def test_no_step_of_ours_takes_much_longer_than_its_aim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._dynamo  # noqa: F401

    monkeypatch.setattr(loops, "MODEL", SMALL)
    monkeypatch.setattr(loops.random_batch, "__defaults__", (4, 128, SMALL.vocab_size))
    figures = tmp_path / "figures.json"
    bench.main(["step", "--rounds", "3", "--parts", *STEPS, "model", "--json", str(figures)])
    for result in json.loads(figures.read_text()):
        assert result["aims"]
        for name, aim in result["aims"].items():
            assert result["ratios"][name] <= aim * SLACK, (result["title"], result["ratios"])


@pytest.mark.slow
def test_the_peak_of_our_forward_and_backward_is_within_its_aim() -> None:
    peaks = model.peak_memory()
    assert peaks[model.OURS] <= 0.8 * peaks[model.TRANSFORMERS]


def test_start_up_prints_how_much_longer_ours_takes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "TORCH_ALONE", "")
    monkeypatch.setattr(startup, "OURS", "import time; time.sleep(0.2)")
    monkeypatch.setattr(startup, "first_step_times_s", lambda _: {"bare": [3.0, 1.0, 2.0], "ours": [3.5, 1.25, 1.75]})
    bench.main(["step", "--rounds", "2", "--parts", "start"])
    printed = capfd.readouterr().out
    assert "torch alone / parallel" in printed and "+0.2" in printed
    assert "bare / ours" in printed and "2.00" in printed and "+0.25" in printed


def test_a_command_that_fails_while_it_is_timed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "TORCH_ALONE", "raise SystemExit('no torch')")
    with pytest.raises(RuntimeError, match="failed: no torch"):
        startup.import_times_s(2)


def test_the_ratio_is_the_median_over_rounds_and_not_the_ratio_of_medians() -> None:
    # A round in which the machine was slow hits both contenders.
    comparison = Comparison(title="", times_s={"theirs": [1.0, 2.0, 9.0], "ours": [1.1, 1.8, 8.1]}, targets={})
    assert comparison.ratio("ours") == pytest.approx(0.9)
    assert comparison.ratio("theirs") == 1


def test_contenders_take_turns_in_changing_order_after_a_round_that_does_not_count() -> None:
    calls: list[str] = []
    contenders = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times_s = interleave(contenders, num_rounds=2, steps_of_a_round=1)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert {name: len(times) for name, times in times_s.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--rounds", "1"], "rounds=1 must be at least 2, for there to be a spread"),
        (["step", "--parts"], "parts is empty; legal: full_shard"),
        (["step", "--parts", "all"], "all"),
        (["stride"], "stride"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(words)
    assert end.value.code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
