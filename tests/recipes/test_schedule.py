"""The learning rate, step by step, and after a resume."""

import json
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from recipes.schedule import Schedule, ScheduleConfig, learning_rate_factor


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
