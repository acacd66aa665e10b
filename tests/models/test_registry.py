"""Tests of the table of model families."""

import pytest

from models.llama import Llama, LlamaConfig
from models.registry import FAMILIES, family, family_of


def test_a_family_is_found_by_name_and_by_config() -> None:
    assert family("llama") is family_of(LlamaConfig())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_of_a_family_fits_its_model(name: str) -> None:
    config = family(name).config()
    family(name).plan(config).check(family(name).build(config))


def test_llama_is_built_as_llama() -> None:
    assert isinstance(family("llama").build(LlamaConfig(num_layers=1)), Llama)


def test_unknown_families_and_configs_are_refused_with_the_legal_ones() -> None:
    with pytest.raises(ValueError, match="unknown model family 'gpt'; legal: llama"):
        family("gpt")
    with pytest.raises(ValueError, match="int is the config of no model family; legal: LlamaConfig"):
        family_of(3)  # type: ignore[arg-type]
