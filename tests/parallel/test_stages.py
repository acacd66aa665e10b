"""A model is cut into stages by its costs, and what a schedule cannot run is refused."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import get_schedule_class

from models.llama.config import LlamaConfig
from models.llama.model import Llama
from models.llama.plan import llama_plan
from parallel import ParallelConfig
from parallel.plan import Block, ParallelPlan
from parallel.schedules import SCHEDULES, check_micro_batches, check_stages, placement
from parallel.stages import balance, check_cut, cut, keep_part, part_of_plan, stage_module

CONFIG = LlamaConfig(num_layers=6)
PLAN = llama_plan(CONFIG)


def config(schedule: str = "1f1b", pp: int = 2, **fields: Any) -> ParallelConfig:
    return ParallelConfig(pp=pp, dp_shard=1, schedule=schedule, **fields)  # type: ignore[arg-type]


def dearest(costs: list[float], counts: tuple[int, ...], before: float, after: float) -> float:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    stages = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    stages[0] += before
    stages[-1] += after
    return max(stages)


def test_no_other_cut_has_a_cheaper_dearest_stage() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        size = int(torch.randint(2, 9, (), generator=generator))
        count = int(torch.randint(1, size + 1, (), generator=generator))
        costs = (torch.rand(size, generator=generator) + 0.1).tolist()
        before, after = (3 * torch.rand(2, generator=generator)).tolist()
        found = balance(costs, count, before=before, after=after)
        assert sum(found) == size and min(found) >= 1
        every = [
            tuple(end - start for start, end in zip((0, *ends), (*ends, size), strict=True))
            for ends in combinations(range(1, size), count - 1)
        ]
        best = min(dearest(costs, each, before, after) for each in every)
        assert dearest(costs, found, before, after) == pytest.approx(best)


def test_embedding_and_head_weigh() -> None:
    assert balance([1.0] * 8, 4) == (2, 2, 2, 2)
    assert balance([1.0] * 8, 4, after=2.0) == (2, 2, 3, 1)
    assert balance([1.0] * 8, 2, before=2.0) == (3, 5)
    # A vocabulary of 128,256 is worth about five blocks of the 1B model, and less than one of the 405B model.
    small, large = LlamaConfig.preset("llama3.2-1b"), LlamaConfig.preset("llama3.1-405b")
    for model, expected in ((small, (5, 5, 5, 1)), (large, (31, 32, 32, 31))):
        stages = cut(llama_plan(model), config(pp=4))
        assert tuple(sum(fqn.startswith("blocks") for fqn in each.modules) for each in stages) == expected


def test_128_layers_are_cut_in_a_moment() -> None:
    counts = balance([1.0] * 128, 32, after=2.0)
    assert sorted([*counts[:-1], counts[-1] + 2]) == [4] * 30 + [5] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_have_every_module_once_in_order(schedule: str) -> None:
    stages = cut(PLAN, config(schedule))
    fqns = [fqn for stage in stages for fqn in stage.modules]
    assert fqns == ["embed", *(f"blocks.{index}" for index in range(6)), "norm", "head"]
    assert [stage.index for stage in stages] == list(range(len(stages)))


def test_stages_by_hand_are_taken_as_they_are() -> None:
    stages = cut(PLAN, config("interleaved_1f1b", stages=(1, 2, 1, 2)))
    assert [len([fqn for fqn in each.modules if fqn.startswith("blocks")]) for each in stages] == [1, 2, 1, 2]


def test_a_v_turns_at_the_last_rank() -> None:
    assert placement(6, 3, is_v=False) == (0, 1, 2, 0, 1, 2)
    assert placement(6, 3, is_v=True) == (0, 1, 2, 2, 1, 0)


def test_a_stage_keeps_the_names_of_the_whole_model_and_nothing_else() -> None:
    with torch.device("meta"):
        whole = Llama(CONFIG)
    names = {fqn for fqn, _ in whole.named_parameters()}
    stages = cut(PLAN, config("interleaved_1f1b"))
    own = [stage for stage in stages if stage.rank == 0]
    keep_part(whole, PLAN, [fqn for stage in own for fqn in stage.modules])
    parts = [stage_module(whole, PLAN, stage) for stage in own]
    assert {fqn for fqn, _ in whole.named_parameters()} < names
    held = [fqn for part in parts for fqn, _ in part.named_parameters()]
    assert sorted(held) == sorted(fqn for fqn, _ in whole.named_parameters())
    for part in parts:
        for fqn, parameter in part.named_parameters():
            assert parameter is whole.get_parameter(fqn)
    assert isinstance(parts[0], Llama) and parts[0].head is None and parts[1].embed is None


def test_units_of_a_stage_are_those_of_its_modules() -> None:
    part = part_of_plan(PLAN, ["blocks.5", "norm", "head"])
    assert [unit.modules for unit in part.units] == [("blocks.5",), ("head",)]
    assert [block.fqn for block in part.blocks] == ["blocks.5"]


class WithTail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
        self.tail = nn.Linear(2, 2)


def test_a_parameter_without_a_stage_is_refused() -> None:
    plan = ParallelPlan(shape=CONFIG.shape, blocks=(Block(fqn="blocks.0", cost=1.0), Block(fqn="blocks.1", cost=1.0)))
    with pytest.raises(ValueError, match=r"2 parameters of WithTail lie elsewhere \(tail.weight"):
        check_cut(WithTail(), plan)
    check_cut(WithTail(), replace(plan, last=(Block(fqn="tail", cost=1.0),)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_torch_agrees_which_numbers_of_micro_batches_a_schedule_runs(schedule: str, pp: int) -> None:
    """Held against the order of actions that torch makes, which it checks itself; fewer than ranks are never run."""
    layout = config(schedule, pp)
    for number in range(pp, 4 * pp + 2):
        try:
            check_micro_batches(layout, number)
            is_legal = True
        except ValueError:
            is_legal = False
        assert is_legal == torch_makes(schedule, pp, number), number


def torch_makes(schedule: str, pp: int, number: int) -> bool:
    traits = SCHEDULES[schedule]
    assert traits.torch_name
    kind = get_schedule_class(traits.torch_name)
    ranks = placement(pp * traits.fewest, pp, is_v=traits.is_v)
    stages = [FakeStage(index, len(ranks), pp) for index, rank in enumerate(ranks) if rank == 0]
    try:
        kind(stages if traits.fewest > 1 else stages[0], number, loss_fn=lambda *_: None)
    except (ValueError, AssertionError):
        return False
    return True


class FakeStage:
    """What a schedule needs to know to be made."""

    def __init__(self, index: int, count: int, pp: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, count, pp, 0
        self.submod, self.has_backward, self.is_last = nn.Identity(), True, index == count - 1


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (config("1f1b", 8), r"needs at least 1 virtual stages a rank, 8 stages in all.*6 blocks: pp can be at most 6"),
        (config("zbv_zero_bubble", 4), r"8 stages in all.*pp can be at most 3"),
        (config("1f1b", stages=(2, 2, 2)), r"stages=\(2, 2, 2\) are 3; legal: a multiple of 2 from 2 to 2"),
        (config("interleaved_1f1b", stages=(3, 3)), r"are 2; legal: a multiple of 2 from 4"),
        (config("dual_pipe_v", stages=(1, 1, 1, 1, 1, 1)), r"runs 2 stages on each.*are 6; legal: .* from 4 to 4"),
        (config("gpipe", stages=(2, 2)), r"stages=\(2, 2\) hold 4 blocks, but the model has 6"),
    ],
)
def test_stages_that_a_schedule_or_a_model_cannot_have_are_refused(layout: ParallelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_stages(layout, CONFIG.shape)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pp": 1, "schedule": None, "stages": (6,)}, r"stages=\(6,\) are those of a pipeline \(pp > 1\)"),
        ({"stages": (6, 0)}, "each has a block or more"),
        ({"reduce_gradients": "every_micro_batch"}, "summed over data-parallel ranks once a step"),
        ({"schedule": "zbv_zero_bubble", "compile": True}, "twice, which compile=True does not allow.*compile=False"),
        (
            {"schedule": "dual_pipe_v", "activation_checkpointing": "selective"},
            "'selective' does not allow.*activation_checkpointing='none'",
        ),
        ({"data_parallel": "zero1"}, "zero1 does not compose with pp=2"),
    ],
)
def test_fields_that_contradict_a_pipeline_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**{"pp": 2, "schedule": "1f1b", **fields})
