"""A plan that does not fit its model is refused, name by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import Block, ParallelPlan, Unit
from parallel.plan import matching

CONFIG = LlamaConfig(num_layers=2)
PLAN = llama_plan(CONFIG)
TIED = LlamaConfig(num_layers=1, tied_embeddings=True)
TIES = (("embed.weight", "head.weight"),)


def model(config: LlamaConfig = CONFIG) -> nn.Module:
    with torch.device("meta"):
        return Llama(config)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "a style that does not exist": (
        {"tensor_parallel": {"embed": "column"}},
        "unknown tensor-parallel style 'column' for 'embed'; legal: .*'colwise'",
    ),
    "a key that matches nothing": (
        {"tensor_parallel": {"blocks.*.attention.q": "colwise"}},
        r"tensor-parallel key 'blocks\.\*\.attention\.q' matches no module of Llama",
    ),
    "a star for more than one name": ({"tensor_parallel": {"blocks.*.q_proj": "colwise"}}, "matches no module"),
    "a unit of no module": (
        {"units": (Unit(modules=("blocks.2",)),)},
        "names 'blocks.2', but Llama has no such module",
    ),
    "a block of no module": ({"blocks": (Block(fqn="layers.0", cost=1.0),)}, "names 'layers.0'"),
    "a module in two units": (
        {"units": (Unit(modules=("embed",)), Unit(modules=("norm", "embed")))},
        r"modules \['embed'\] stand in more than one sharding unit",
    ),
    "a tied name that does not exist": (
        {"tied": (("embed.weight", "lm_head.weight"),)},
        r"\['lm_head.weight'\] do not",
    ),
    "tied names of two parameters": ({"tied": TIES}, "different parameters"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_is(name: str) -> None:
    fields, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **fields).check(model())


def test_a_parameter_with_two_names_must_be_declared_as_tied() -> None:
    with pytest.raises(ValueError, match=r"\['embed.weight', 'head.weight'\] are one parameter"):
        replace(llama_plan(TIED), tied=()).check(model(TIED))


@pytest.mark.parametrize("units", [(("embed",), ("head",)), (("embed",),), (("norm", "head"),)])
def test_tied_parameters_in_different_units_are_refused(units: tuple[tuple[str, ...], ...]) -> None:
    plan = replace(llama_plan(TIED), units=tuple(Unit(modules=each) for each in units))
    with pytest.raises(ValueError, match="must lie in one sharding unit"):
        plan.check(model(TIED))


def test_tied_parameters_may_share_a_unit() -> None:
    replace(llama_plan(TIED), units=(Unit(modules=("embed", "head")),)).check(model(TIED))


@pytest.mark.parametrize(
    "config",
    [CONFIG, TIED, LlamaConfig(num_layers=1, qk_norm=True, attention_bias=True)],
    ids=["plain", "tied", "qwen"],
)
def test_the_plan_of_a_model_fits_it(config: LlamaConfig) -> None:
    llama_plan(config).check(model(config))


def test_a_plan_of_a_shape_alone_is_legal() -> None:
    ParallelPlan(shape=CONFIG.shape).check(model())


def test_a_star_stands_for_one_name() -> None:
    fqns = dict.fromkeys(["blocks", "blocks.0", "blocks.1", "blocks.0.norm", "blocks.10.norm", "norm"])
    assert matching("blocks.*", fqns) == ["blocks.0", "blocks.1"]
    assert matching("blocks.*.norm", fqns) == ["blocks.0.norm", "blocks.10.norm"]
    assert matching("*", fqns) == ["blocks", "norm"]
    assert matching("norm", fqns) == ["norm"]
