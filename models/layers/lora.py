"""Low-rank adapters beside linear maps whose own weights stay as they are."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from parallel.plan import ParallelPlan, TensorParallelStyle, matching

# ... any dims, I inputs, O outputs, R rank

ADAPTER = "adapter"
"""Name of an adapter within the linear map that it belongs to."""

_STYLES: dict[TensorParallelStyle, tuple[TensorParallelStyle, TensorParallelStyle]] = {
    "colwise": ("weight_replicate", "weight_colwise"),
    "rowwise": ("weight_rowwise", "weight_replicate"),
    "partial_colwise": ("partial_replicate", "partial_colwise"),
    "partial_rowwise": ("partial_rowwise", "partial_replicate"),
}
"""How the two matrices of an adapter split, by how the map beside it does: what has R rows or columns is never split
along those, as R is small."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which linear maps get an adapter, and of which size.

    Attributes:
        rank: Width between the two matrices of an adapter; 0: the model has no adapters and all of it is trained.
        alpha: An adapter's output is multiplied by alpha / rank.
        targets: Linear maps, by fqn pattern in which `*` stands for a part of one name.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("blocks.*.attention.q_proj", "blocks.*.attention.v_proj")

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        if type(self.rank) is not int or self.rank < 0:
            raise ValueError(f"lora.rank={self.rank!r} must be an integer of at least 0 (0: no adapters)")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"lora.alpha={self.alpha!r} must be a positive number")
        if self.rank and not self.targets:
            raise ValueError(f"lora.rank={self.rank} needs lora.targets, such as blocks.*.attention.q_proj")

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by; 0 where there is none."""
        return self.alpha / self.rank if self.rank else 0.0


class Adapter(nn.Module):
    """Two matrices of low rank, one after the other.

    Attributes:
        a: To R components.
        b: From them.

    Args:
        linear: The map that it belongs to, whose device and dtype it shares.
        config: Its size.
    """

    def __init__(self, linear: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.scale = config.scale
        self.a = nn.Linear(linear.in_features, config.rank, bias=False, **like)
        self.b = nn.Linear(config.rank, linear.out_features, bias=False, **like)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the output of the map, [..., O].

        Args:
            x: Input of the map, [..., I].
        """
        out: Tensor = self.b(self.a(x)) * self.scale
        return out

    @torch.no_grad()
    def init_parameter(self, fqn: str, tensor: Tensor, generator: Generator) -> None:
        """Fills a with values as `nn.Linear` has them and b with zeros, so that a new adapter changes nothing.

        Args:
            fqn: Name of the parameter in the whole model.
            tensor: The whole parameter; filled in place.
            generator: Source of random numbers, on the tensor's device.
        """
        if fqn.endswith(".a.weight"):
            bound = 1 / math.sqrt(tensor.shape[1])
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            tensor.zero_()


class AdaptedLinear(nn.Linear):
    """A linear map with an adapter beside it; its own parameters keep their names.

    Attributes:
        adapter: The adapter.

    Args:
        linear: The map, whose parameters it takes over.
        config: Size of the adapter.
    """

    def __init__(self, linear: nn.Linear, config: LoraConfig) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.adapter = Adapter(linear, config)

    def forward(self, x: Tensor) -> Tensor:
        """The map of x and what the adapter adds, [..., O].

        Args:
            x: Input, [..., I].
        """
        out: Tensor = super().forward(x) + self.adapter(x)
        return out


def add_adapters(model: nn.Module, plan: ParallelPlan, config: LoraConfig) -> ParallelPlan:
    """Gives linear maps of a whole model adapters, in place, and freezes all else.

    Args:
        model: The model before `parallelize`; parameters may be on meta.
        plan: What it declares.
        config: Which maps, and the size of their adapters.

    Returns:
        What the model declares now.

    Raises:
        ValueError: If the config asks for no adapters, a pattern matches nothing, or what it matches is no linear map.
    """
    if not config.rank:
        raise ValueError(f"lora.rank={config.rank} asks for no adapters; set a rank of at least 1")
    modules = dict(model.named_modules())
    targets = {fqn: pattern for pattern in config.targets for fqn in _targets(pattern, modules)}
    model.requires_grad_(False)
    for fqn in targets:
        model.set_submodule(fqn, AdaptedLinear(modules[fqn], config))
    styles = dict(plan.tensor_parallel)
    for pattern, style in plan.tensor_parallel.items():
        if style in _STYLES and any(fqn in targets for fqn in matching(pattern, modules)):
            styles |= {f"{pattern}.{ADAPTER}.{name}": each for name, each in zip("ab", _STYLES[style], strict=True)}
    return replace(plan, tensor_parallel=styles)


def is_of_adapter(fqn: str) -> bool:
    """Whether a parameter belongs to an adapter.

    Args:
        fqn: Its name.
    """
    return f".{ADAPTER}." in fqn


def _targets(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    found = matching(pattern, modules)
    if not found:
        linear = sorted({fqn.rpartition(".")[2] for fqn, each in modules.items() if type(each) is nn.Linear})
        raise ValueError(
            f"lora target {pattern!r} matches no module; the model's linear maps are called {', '.join(linear)}: give "
            "a whole name in which * stands for one part, such as blocks.*.attention.q_proj"
        )
    others = [fqn for fqn in found if type(modules[fqn]) is not nn.Linear]
    if others:
        raise ValueError(
            f"lora target {pattern!r} matches {others[0]}, which is a {type(modules[others[0]]).__name__}; adapters "
            "are for linear maps alone"
        )
    return found
