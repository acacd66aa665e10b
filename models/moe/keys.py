"""Where Hugging Face safetensors files keep the parameters of a model with mixtures of experts."""

from collections.abc import Iterator, Set
from typing import Literal

from models.hub import HubPart
from models.llama.keys import to_hub_name
from models.moe.config import MoeConfig

HubLayout = Literal["mixtral", "qwen3_moe", "stacked"]
"""Names of Mixtral's files; of Qwen3-MoE's; those that modules of `transformers` 5 have, with experts stacked."""

_LAYER = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp", "stacked": "mlp"}
_EXPERT = {
    "mixtral": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "qwen3_moe": {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"},
}


def hub_parts(config: MoeConfig, fqn: str, names: Set[str] | None) -> tuple[HubPart, ...]:
    """Where Hugging Face files keep a parameter: each matrix of each expert by itself, or all experts of a layer.

    Args:
        config: Shape of the model.
        fqn: Such as `blocks.0.feed_forward.experts.gate_proj`.
        names: Names in the folder. None: one is to be written, as Mixtral's or Qwen3-MoE's, each matrix by itself.

    Raises:
        ValueError: If the files have no place for it.
    """
    block, _, name = fqn.partition(".feed_forward.")
    kind, _, matrix = name.partition(".")
    if kind not in ("router", "experts", "shared_expert"):
        return (HubPart(name=to_hub_name(fqn)),)
    layout = hub_layout(config, names)
    layer = f"{block.replace('blocks', 'model.layers', 1)}.{_LAYER[layout]}"
    if name == "router.weight":
        return (HubPart(name=f"{layer}.gate.weight"),)
    if kind == "experts" and matrix in _EXPERT["qwen3_moe"]:
        return tuple(_experts(config, layer, matrix, layout))
    raise ValueError(f"{fqn!r} is in no file of Mixtral or Qwen3-MoE, which have no shared expert and no bias")


def hub_layout(config: MoeConfig, names: Set[str] | None) -> HubLayout:
    """How the files of a folder name experts.

    Args:
        config: Shape of the model.
        names: Names in the folder. None: one is to be written.

    Raises:
        ValueError: If the names are none of the known ways.
    """
    if names is None:
        return "qwen3_moe" if config.qk_norm else "mixtral"
    endings: dict[HubLayout, str] = {
        "mixtral": ".experts.0.w1.weight",
        "qwen3_moe": ".experts.0.gate_proj.weight",
        "stacked": ".experts.gate_up_proj",
    }
    for layout, ending in endings.items():
        if any(name.endswith(ending) for name in names):
            return layout
    raise ValueError(f"no tensor holds experts: none of the names ends in {', '.join(endings.values())}")


def _experts(config: MoeConfig, layer: str, matrix: str, layout: HubLayout) -> Iterator[HubPart]:
    if layout == "stacked":
        width = config.expert_width
        rows = {"gate_proj": (0, width), "up_proj": (width, 2 * width)}.get(matrix)
        name = "down_proj" if rows is None else "gate_up_proj"
        yield HubPart(name=f"{layer}.experts.{name}", rows=rows, transposed=True)
        return
    for expert in range(config.num_experts):
        name = f"{layer}.experts.{expert}.{_EXPERT[layout][matrix]}.weight"
        yield HubPart(name=name, expert=expert, transposed=True)
