"""The learning rate, step by step, and after a resume."""

import json
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from recipes.data import DataStream, PackedDataset
from recipes.schedule import Schedule, ScheduleConfig, learning_rate_factor
from tests.recipes.data_stores import byte_store


def _optimizer(lr: float = 0.1) -> Optimizer:
    slow: dict[str, Any] = {"params": [nn.Parameter(torch.ones(2))], "lr": lr / 10}
    return AdamW([{"params": [nn.Parameter(torch.ones(2))]}, slow], lr=lr)


def _rates(optimizer: Optimizer, schedule: Schedule, num_steps: int) -> list[tuple[float, ...]]:
    rates = []
    for _ in range(num_steps):
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return rates


def test_factors_equal_those_by_hand() -> None:
    config = ScheduleConfig(warmup_steps=2, min_ratio=0.2)
    factors = [learning_rate_factor(step, config, 6) for step in range(8)]
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    expected = [0.5, 1.0, quarter, 0.6, 0.2 + 0.8 - (quarter - 0.2), 0.2, 0.2, 0.2]
    assert factors == pytest.approx(expected)


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (1, 1), (5, 5), (0, 10), (3, 40)])
def test_the_rate_is_never_zero_rises_then_falls_and_ends_at_its_minimum(warmup_steps: int, total_steps: int) -> None:
    config = ScheduleConfig(warmup_steps=warmup_steps, min_ratio=0.1)
    factors = [learning_rate_factor(step, config, total_steps) for step in range(total_steps)]
    assert min(factors) > 0
    assert max(factors) <= 1
    assert factors[:warmup_steps] == sorted(factors[:warmup_steps])
    assert factors[warmup_steps:] == sorted(factors[warmup_steps:], reverse=True)
    assert factors[-1] == pytest.approx(1.0 if warmup_steps == total_steps else 0.1)


def test_the_schedule_counts_optimizer_steps_and_scales_each_group() -> None:
    optimizer, config = _optimizer(), ScheduleConfig(warmup_steps=2)
    rates = _rates(optimizer, Schedule(optimizer, config, 10), 10)
    factors = [learning_rate_factor(step, config, 10) for step in range(10)]
    assert rates == [pytest.approx((0.1 * factor, 0.01 * factor)) for factor in factors]


def test_the_schedule_counts_the_short_step_that_ends_an_epoch_as_one() -> None:
    # Five samples in micro-batches of one, four a step: an epoch is two steps, and so is the schedule.
    dataset = PackedDataset(byte_store(bytes(5 * 8 - 1)), sequence_length=8)
    stream = DataStream(dataset, global_batch=4, micro_batch=1, dp_rank=0, dp_degree=1, seed=0)
    optimizer, config = _optimizer(), ScheduleConfig(warmup_steps=1, min_ratio=0.2)
    schedule = Schedule(optimizer, config, 2 * stream.steps_per_epoch)
    while stream.epoch == 0:
        stream.next_step()
        optimizer.step()
        schedule.step()
    assert schedule.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * learning_rate_factor(2, config, 4))


@pytest.mark.parametrize("num_steps", [0, 1, 5, 9])
def test_a_resumed_schedule_gives_the_rates_of_the_uninterrupted_one(num_steps: int) -> None:
    config = ScheduleConfig(warmup_steps=3)
    optimizer = _optimizer()
    schedule = Schedule(optimizer, config, 10)
    _rates(optimizer, schedule, num_steps)
    state = json.loads(json.dumps(schedule.state_dict()))
    resumed_optimizer = _optimizer()
    resumed = Schedule(resumed_optimizer, config, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(state)
    assert resumed.get_last_lr() == schedule.get_last_lr()
    assert _rates(resumed_optimizer, resumed, 6) == _rates(optimizer, schedule, 6)


def test_a_changed_schedule_or_peak_is_reported_on_resume_and_is_the_one_that_holds() -> None:
    optimizer = _optimizer()
    state = Schedule(optimizer, ScheduleConfig(warmup_steps=2), 10).state_dict()
    longer = Schedule(_optimizer(), ScheduleConfig(warmup_steps=2), 20)
    with pytest.warns(UserWarning, match="total_steps 10 -> 20$"):
        longer.load_state_dict({**state, "step": 15})
    assert longer.get_last_lr()[0] == 0.1 * learning_rate_factor(15, ScheduleConfig(warmup_steps=2), 20)
    higher = Schedule(_optimizer(0.2), ScheduleConfig(warmup_steps=2), 10)
    with pytest.warns(UserWarning, match=r"peaks \[0.1, 0.01\] -> \[0.2, 0.02\]$"):
        higher.load_state_dict(state)


def test_illegal_schedules_and_states_are_refused() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        ScheduleConfig(warmup_steps=-1)
    with pytest.raises(ValueError, match=r"min_ratio=1\.5"):
        ScheduleConfig(min_ratio=1.5)
    with pytest.raises(ValueError, match="warmup_steps=11 must not exceed the 10 optimizer steps"):
        Schedule(optimizer, ScheduleConfig(warmup_steps=11), 10)
    with pytest.raises(ValueError, match="total_steps=0"):
        Schedule(optimizer, ScheduleConfig(warmup_steps=0), 0)
    with pytest.raises(ValueError, match="has no step"):
        Schedule(optimizer, ScheduleConfig(warmup_steps=0), 10).load_state_dict({"last_epoch": 3})


def test_wsd_factors_equal_those_by_hand() -> None:
    def factors(**values: Any) -> list[float]:
        config = ScheduleConfig(shape="wsd", warmup_steps=2, decay_fraction=0.4, **values)
        return [learning_rate_factor(step, config, 10) for step in range(12)]

    # Two steps up, four at the peak, four down; after the run it stays.
    up = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert factors(min_ratio=0.2) == pytest.approx([*up, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert factors(min_ratio=0.0) == pytest.approx([*up, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0])
    root = math.sqrt(0.5)
    assert factors(min_ratio=0.0, decay="sqrt") == pytest.approx([*up, 0.5, 1 - root, 1 - math.sqrt(0.75), 0, 0, 0])
    assert factors(min_ratio=0.0625, decay="exponential") == pytest.approx([*up, 0.5, 0.25, 0.125, *[0.0625] * 3])
    assert factors(min_ratio=0.0, decay="cosine") == pytest.approx(
        [*up, (1 + root) / 2, 0.5, (1 - root) / 2, 0.0, 0.0, 0.0]
    )


@pytest.mark.parametrize(
    ("fraction", "total_steps", "expected"), [(0.07, 100, 7), (0.1, 31, 4), (0.0, 30, 0), (0.25, 3, 1), (1.0, 7, 7)]
)
def test_the_share_of_decay_steps_is_rounded_up(fraction: float, total_steps: int, expected: int) -> None:
    config = ScheduleConfig(shape="wsd", warmup_steps=0, decay_fraction=fraction)
    assert config.decay_steps(total_steps) == expected
    factors = [learning_rate_factor(step, config, total_steps) for step in range(total_steps)]
    assert sum(factor < 1 for factor in factors) == expected


def test_a_stable_run_that_is_made_longer_is_one_that_was_planned_so() -> None:
    config = ScheduleConfig(shape="wsd", warmup_steps=2, decay_fraction=0.2)
    optimizer, resumed_optimizer = _optimizer(), _optimizer()
    schedule = Schedule(optimizer, config, 10)
    _rates(optimizer, schedule, 7)
    resumed = Schedule(resumed_optimizer, config, 20)
    with pytest.warns(UserWarning, match="total_steps 10 -> 20$"):
        resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    planned = Schedule(_optimizer(), config, 20)
    assert resumed.get_last_lr()[0] == 0.1
    planned_optimizer = planned.optimizer
    assert _rates(resumed_optimizer, resumed, 13) == _rates(planned_optimizer, planned, 20)[7:]


def test_a_schedule_that_contradicts_itself_is_refused() -> None:
    for values, message in (
        ({"shape": "wds"}, "unknown shape 'wds'; legal: cosine, wsd"),
        ({"decay": "steep"}, "unknown decay 'steep'; legal: linear, cosine, sqrt, exponential"),
        ({"decay_fraction": 1.5}, "decay_fraction=1.5 must be at most 1"),
        ({"decay": "exponential", "min_ratio": 0.0}, "never reaches min_ratio=0"),
    ):
        with pytest.raises(ValueError, match=message):
            ScheduleConfig(**values)
    both = ScheduleConfig(shape="wsd", warmup_steps=6, decay_fraction=0.5)
    with pytest.raises(ValueError, match=r"warmup_steps=6 and the 5 steps of .* together exceed the 10"):
        Schedule(_optimizer(), both, 10)
    Schedule(_optimizer(), both, 12)


def test_a_schedule_is_told_in_a_few_words() -> None:
    assert ScheduleConfig(warmup_steps=2).describe(10) == "then by half a cosine to 0.1 of it"
    config = ScheduleConfig(shape="wsd", warmup_steps=2, decay_fraction=0.2, min_ratio=0.0, decay="sqrt")
    assert config.describe(10) == "then stable, in the last 2 steps sqrt to 0 of it"
