"""The closed forms that textbooks give for traffic and memory, to set beside the exact figures."""

from dataclasses import dataclass
from math import prod

from parallel.ledger.parts import ModelParts, num_shards
from parallel.traits import TRAITS


@dataclass(frozen=True, kw_only=True)
class Form:
    """A formula and what it gives.

    Attributes:
        text: With P for the model's parameters, N for the ranks that share one copy, R for replicas, t for `tp`; where
            ep splits experts E for theirs among P, and e for `ep`.
        num_bytes: Its value.
    """

    text: str
    num_bytes: float


def traffic_form(parts: ModelParts) -> Form:
    """Bytes that a rank of a ring sends for parameters and gradients, all units freed after forward where any are.

    Args:
        parts: The model in its layout.

    Source: Rajbhandari et al. 2020, "ZeRO", section 7.
    """
    config, traits = parts.config, TRAITS[parts.config.data_parallel]
    size, itemsize = _parameters(parts), _itemsize(parts)
    shards = num_shards(config)
    replicas = config.dp_replicate * config.dp_shard * config.cp // shards
    words: list[str] = []
    total = 0.0
    if shards > 1:
        times = 3 if config.resolved_strategy in ("full_shard", "hybrid_shard") else 2
        experts, ep = _experts(parts), config.ep
        words.append(f"{times * itemsize}{'(P-E)' if experts else 'P'}(N-1)/N")
        total += times * itemsize * (size - experts) * (shards - 1) / shards
        if experts:
            # A rank gathers its own experts from those that hold the same.
            words.append(f"{times * itemsize}(E/e)(N/e-1)/(N/e)")
            total += times * itemsize * experts / ep * (shards // ep - 1) / (shards // ep)
    if replicas > 1:
        times = 3 if traits.splits_optimizer_rows else 2
        words.append(f"{times * itemsize}P(R-1)/R" if shards == 1 else f"{times * itemsize}(P/N)(R-1)/R")
        total += times * itemsize * size / shards * (replicas - 1) / replicas
    text = " + ".join(words) or "0"
    return Form(text=text if config.tp == 1 else f"{text}, P/t each", num_bytes=total)


def state_forms(parts: ModelParts) -> tuple[Form, Form, Form]:
    """Bytes of parameters, gradients and AdamW's moments at rest, at the end of forward, at the end of backward.

    Args:
        parts: The model in its layout.
    """
    config, itemsize, size = parts.config, _itemsize(parts), _parameters(parts)
    shards = num_shards(config)
    compute = config.precision.compute_dtype
    cast = itemsize if compute is None else compute.itemsize
    traits = TRAITS[config.data_parallel]
    keeps = traits.shards and config.resolved_strategy not in ("full_shard", "hybrid_shard")
    # `fully_shard` computes with a copy even of what is whole; flattened units do not.
    keeps = keeps and not (traits.flattens and shards == 1)
    own = "P" if shards == 1 else "P/N"
    if traits.splits_optimizer_rows:
        ranks = config.dp_replicate * config.cp
        rest, rest_text = itemsize + 2 * itemsize / ranks, f"{itemsize}P + {2 * itemsize}P/R"
        end, end_text = rest + itemsize, f"{2 * itemsize}P + {2 * itemsize}P/R"
    else:
        rest, rest_text = 3 * itemsize / shards, f"{3 * itemsize}{own}"
        end, end_text = 4 * itemsize / shards, f"{4 * itemsize}{own}"
    forward = Form(text=f"{rest_text} + {cast}P" if keeps else rest_text, num_bytes=(rest + cast * keeps) * size)
    return Form(text=rest_text, num_bytes=rest * size), forward, Form(text=end_text, num_bytes=end * size)


def _parameters(parts: ModelParts) -> int:
    """Elements of one copy that the ranks of a `tp` group have between them, by rank 0's share."""
    return sum(prod(each.split(parts.config.tp, 0)) * each.ep for each in parts.parameters)


def _experts(parts: ModelParts) -> int:
    """Those of them that ep splits."""
    return sum(prod(each.split(parts.config.tp, 0)) * each.ep for each in parts.parameters if each.ep > 1)


def _itemsize(parts: ModelParts) -> int:
    return parts.parameters[0].dtype.itemsize
