"""Tests of where Hugging Face files keep parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.moe import MOE_HUB, Moe, MoeConfig
from tests.models.moe.small_moe import part_of_file, part_of_parameter


def _stacked(fqn: str, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """How modules of transformers 5 hold experts, written out."""
    gate, up, down = (parameters[f"{fqn}.{name}_proj"] for name in ("gate", "up", "down"))
    return {"gate_up_proj": torch.cat([gate.mT, up.mT], dim=1), "down_proj": down.mT}


def _by_expert(names: tuple[str, str, str]) -> Callable[[str, dict[str, Tensor]], dict[str, Tensor]]:
    """How files of Mixtral and Qwen3-MoE hold them, written out."""

    def split(fqn: str, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            f"{expert}.{theirs}.weight": parameters[f"{fqn}.{ours}_proj"][expert].T
            for ours, theirs in zip(("gate", "up", "down"), names, strict=True)
            for expert in range(3)
        }

    return split


LAYOUTS: dict[str, tuple[str, Callable[[str, dict[str, Tensor]], dict[str, Tensor]], dict[str, Any]]] = {
    "stacked": ("mlp", _stacked, {}),
    "mixtral": ("block_sparse_moe", _by_expert(("w1", "w3", "w2")), {}),
    "qwen3_moe": ("mlp", _by_expert(("gate_proj", "up_proj", "down_proj")), {"qk_norm": True}),
}


def _model(**fields: Any) -> Moe:
    config = MoeConfig(num_layers=11, width=8, num_heads=2, num_kv_heads=1, num_experts=3, expert_width=5, **fields)
    return Moe(config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_make_up_the_tensors_of_files_and_the_parameters(layout: str) -> None:
    layer, split, fields = LAYOUTS[layout]
    model = _model(dense_layers=(1,), **fields)
    parameters = dict(model.state_dict())
    files: dict[str, Tensor] = {}
    for index in (0, 2, 10):
        fqn = f"blocks.{index}.feed_forward"
        where = f"model.layers.{index}.{layer}"
        files |= {f"{where}.experts.{name}": each for name, each in split(f"{fqn}.experts", parameters).items()}
        files[f"{where}.gate.weight"] = parameters[f"{fqn}.router.weight"]
    dense = {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    met = {}
    for fqn, parameter in parameters.items():
        filled = torch.full_like(parameter, torch.nan)
        for part in MOE_HUB.parts(model.config, fqn, files.keys()):
            met[part.name] = fqn
            if part.name in files:
                part_of_parameter(part, filled).copy_(part_of_file(part, files[part.name]))
        if any(part.name in files for part in MOE_HUB.parts(model.config, fqn, files.keys())):
            assert torch.equal(filled, parameter), fqn
    assert files.keys() | dense <= met.keys()


@pytest.mark.parametrize("layout", ["mixtral", "qwen3_moe"])
def test_each_matrix_of_each_expert_is_written_by_itself(layout: str) -> None:
    layer, split, fields = LAYOUTS[layout]
    model = _model(**fields)
    parameters = dict(model.state_dict())
    fqn = "blocks.3.feed_forward.experts"
    expected = {f"model.layers.3.{layer}.experts.{name}" for name in split(fqn, parameters)}
    names = ("gate_proj", "up_proj", "down_proj")
    assert expected == {part.name for name in names for part in MOE_HUB.parts(model.config, f"{fqn}.{name}", None)}


def test_what_files_have_no_place_for_is_refused() -> None:
    model = _model(shared_expert_width=4, balance_rate=0.1)
    for name in ("router.selection_bias", "shared_expert.up_proj.weight", "experts.bias"):
        with pytest.raises(ValueError, match="is in no file of Mixtral or Qwen3-MoE"):
            MOE_HUB.parts(model.config, f"blocks.0.feed_forward.{name}", None)
    with pytest.raises(ValueError, match="no tensor holds experts"):
        MOE_HUB.parts(model.config, "blocks.0.feed_forward.experts.up_proj", {"model.layers.0.mlp.gate_proj.weight"})
