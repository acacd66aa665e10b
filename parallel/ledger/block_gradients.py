"""Says which results of a block autograd follows, where some parameters are frozen and adapters stand beside others."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from parallel.ledger.lookup import by_block
from parallel.ledger.parts import ModelParts, ParameterSpec

PROJECTIONS = {
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "o": "attention.o_proj",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}
"""Matrices of a block of a dense decoder, in the order in which they multiply."""

_NORMS = {
    "attention norm": "attention_norm",
    "feed-forward norm": "feed_forward_norm",
    "q norm": "attention.q_norm",
    "k norm": "attention.k_norm",
}


class LowRank(NamedTuple):
    """An adapter beside a projection.

    Attributes:
        rank: Width between its two matrices.
        first: Elements of the rank's part of the one that comes first.
        second: Those of the other.
    """

    rank: int
    first: int
    second: int


@dataclass(frozen=True, kw_only=True)
class BlockGradients:
    """Where gradients flow in a block.

    Attributes:
        trained: Projections and norms whose weights are trained; `router`, where there are experts, is another.
        adapters: Adapters by the projection that they belong to.
        followed: Results that have a gradient: the stream before the block (`x`), after attention (`middle`) and after
            the block (`out`), what norms give by the name of the norm, and what projections give by theirs.
    """

    trained: frozenset[str]
    adapters: tuple[tuple[str, LowRank], ...]
    followed: frozenset[str]

    def adapter(self, name: str) -> LowRank | None:
        """The adapter of a projection.

        Args:
            name: The projection.
        """
        return dict(self.adapters).get(name)

    def keeps_input(self, *names: str) -> bool:
        """Whether some projections need what they read for their backward: to get gradients of their own weights.

        Args:
            names: The projections, which all read the same.
        """
        return any(name in self.trained or self.adapter(name) is not None for name in names)


@lru_cache(maxsize=1024)
def block_gradients(parts: ModelParts, index: int, tp_rank: int) -> BlockGradients:
    """Where gradients flow in one of a rank's blocks.

    Args:
        parts: The rank's part of the model.
        index: Number of the block among the rank's.
        tp_rank: Place of the rank along `tp`.
    """
    fqn = parts.plan.blocks[index].fqn
    specs = by_block(parts)[fqn]
    trained = frozenset(
        name
        for name, module in (PROJECTIONS | _NORMS).items()
        if any(_is_trained(specs, f"{fqn}.{each}") for each in _parameters_of(module))
    )
    if _is_trained(specs, f"{fqn}.feed_forward.router.weight"):
        trained |= {"router"}
    adapters = {}
    for name, module in PROJECTIONS.items():
        first, second = (specs.get(f"{fqn}.{module}.adapter.{each}.weight") for each in "ab")
        if first is not None and second is not None:
            sizes = [prod(each.split(parts.config.tp, tp_rank)) for each in (first, second)]
            adapters[name] = LowRank(first.shape[0], *sizes)
    own = {name: name in trained or name in adapters for name in PROJECTIONS | _NORMS}
    return BlockGradients(
        trained=trained, adapters=tuple(adapters.items()), followed=_followed(own, flows=_flows(parts, index))
    )


def gradients_behind(last: BlockGradients, *, norm_is_trained: bool) -> BlockGradients:
    """Where gradients flow behind all blocks.

    Args:
        last: The same of the last block.
        norm_is_trained: Whether the last norm is.
    """
    flows = last.followed & {"out"}
    own = {"norm"} if norm_is_trained else set()
    followed = flows | ({"norm"} if flows or norm_is_trained else set())
    return BlockGradients(trained=frozenset(own), adapters=(), followed=frozenset(followed))


def _followed(own: dict[str, bool], *, flows: bool) -> frozenset[str]:
    """Names of results that have a gradient, where some have parameters of their own that are trained."""
    has = {"x": flows, "attention norm": flows or own["attention norm"]}
    for name in "qkv":
        has[name] = has["attention norm"] or own[name]
    has |= {f"{name} norm": has[name] or own[f"{name} norm"] for name in "qk"}
    has["attention"] = has["q norm"] or has["k norm"] or has["v"]
    has["o"] = has["attention"] or own["o"]
    has["middle"] = flows or has["o"]
    has["feed-forward norm"] = has["middle"] or own["feed-forward norm"]
    for name in ("gate", "up"):
        has[name] = has["feed-forward norm"] or own[name]
    has["hidden"] = has["gate"] or has["up"]
    has["down"] = has["hidden"] or own["down"]
    has["out"] = has["middle"] or has["down"]
    return frozenset(name for name, is_followed in has.items() if is_followed)


def _flows(parts: ModelParts, index: int) -> bool:
    """Whether the stream before a block has a gradient; what comes from another stage of a pipeline always has."""
    before = ("embed.", *(f"{block.fqn}." for block in parts.plan.blocks[:index]))
    first = parts.whole.blocks[0].fqn == parts.plan.blocks[0].fqn
    return not first or any(each.has_gradient and each.fqn.startswith(before) for each in parts.parameters)


def _parameters_of(module: str) -> tuple[str, ...]:
    """Names of a module's parameters, and of that which has the matrices of all experts in its place."""
    return f"{module}.weight", f"{module}.bias", module.replace("feed_forward.", "feed_forward.experts.")


def _is_trained(specs: Mapping[str, ParameterSpec], fqn: str) -> bool:
    return fqn in specs and specs[fqn].has_gradient
