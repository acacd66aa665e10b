"""The closed forms that textbooks give for traffic and memory, to set beside the exact figures."""

from dataclasses import dataclass
from math import prod

from parallel.ledger.parts import ModelParts, num_shards
from parallel.traits import TRAITS


@dataclass(frozen=True, kw_only=True)
class Form:
    """A formula and what it gives.

    Attributes:
        text: With P for the model's parameters, T for those that are trained where some are not, N for the ranks that
            share one copy, R for replicas, t for `tp`; where ep splits experts E for theirs among P, F for theirs among
            T, and e for `ep`.
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
    size, trained, itemsize = _parameters(parts), _parameters(parts, trained=True), _itemsize(parts)
    shards, is_partial = num_shards(config), trained < size
    replicas = config.dp_replicate * config.dp_shard * config.cp // shards
    words: list[str] = []
    total = 0.0
    if shards > 1:
        gathers = 2 if config.resolved_strategy in ("full_shard", "hybrid_shard") else 1
        experts, of_experts = _parameters(parts, experts=True), _parameters(parts, experts=True, trained=True)
        names = ("(P-E)", "(T-F)") if experts else ("P", "T")
        words.append(f"{_words(gathers * itemsize, itemsize, *names, is_partial)}(N-1)/N")
        total += itemsize * (gathers * (size - experts) + trained - of_experts) * (shards - 1) / shards
        if experts:
            # A rank gathers its own experts from those that hold the same.
            words.append(f"{_words(gathers * itemsize, itemsize, '(E/e)', '(F/e)', is_partial)}(N/e-1)/(N/e)")
            others = shards // config.ep
            total += itemsize * (gathers * experts + of_experts) / config.ep * (others - 1) / others
    if replicas > 1:
        times = 3 if traits.splits_optimizer_rows else 2
        name = "T" if is_partial else "P"
        words.append(f"{times * itemsize}{name if shards == 1 else f'({name}/N)'}(R-1)/R")
        total += times * itemsize * trained / shards * (replicas - 1) / replicas
    text = " + ".join(words) or "0"
    return Form(text=text if config.tp == 1 else f"{text}, P/t each", num_bytes=total)


def _words(of_all: int, of_trained: int, all_: str, trained: str, is_partial: bool) -> str:
    """So many bytes of each parameter and so many of each trained one."""
    return f"({of_all}{all_} + {of_trained}{trained})" if is_partial else f"{of_all + of_trained}{all_}"


def state_forms(parts: ModelParts) -> tuple[Form, Form, Form]:
    """Bytes of parameters, gradients and AdamW's moments at rest, at the end of forward, at the end of backward.

    Args:
        parts: The model in its layout.
    """
    config, itemsize, size = parts.config, _itemsize(parts), _parameters(parts)
    trained = _parameters(parts, trained=True)
    shards, is_partial = num_shards(config), trained < size
    compute = config.precision.compute_dtype
    cast = itemsize if compute is None else compute.itemsize
    traits = TRAITS[config.data_parallel]
    keeps = traits.shards and config.resolved_strategy not in ("full_shard", "hybrid_shard")
    # `fully_shard` computes with a copy even of what is whole; flattened units do not.
    keeps = keeps and not (traits.flattens and shards == 1)
    all_, own = ("P", "T") if shards == 1 else ("P/N", "T/N")
    if traits.splits_optimizer_rows:
        ranks = config.dp_replicate * config.cp
        moments, moments_text = 2 * itemsize * trained / ranks, f" + {2 * itemsize}{own if is_partial else all_}/R"
        rest, rest_text = itemsize * size + moments, f"{itemsize}P{moments_text}"
        end_text = f"{_words(itemsize, itemsize, 'P', 'T', is_partial).strip('()')}{moments_text}"
    else:
        rest = itemsize * (size + 2 * trained) / shards
        rest_text = _words(itemsize, 2 * itemsize, all_, own, is_partial).strip("()")
        end_text = _words(itemsize, 3 * itemsize, all_, own, is_partial).strip("()")
    forward = Form(text=f"{rest_text} + {cast}P" if keeps else rest_text, num_bytes=rest + cast * keeps * size)
    end = rest + itemsize * trained / shards
    return Form(text=rest_text, num_bytes=rest), forward, Form(text=end_text, num_bytes=end)


def _parameters(parts: ModelParts, *, experts: bool = False, trained: bool = False) -> int:
    """Elements of one copy that the ranks of a `tp` group have between them, by rank 0's share.

    Args:
        parts: The model in its layout.
        experts: Count those alone that ep splits.
        trained: Count those alone that are trained.
    """
    return sum(
        prod(each.split(parts.config.tp, 0)) * each.ep
        for each in parts.parameters
        if (each.ep > 1 or not experts) and (each.trainable or not trained)
    )


def _itemsize(parts: ModelParts) -> int:
    return parts.parameters[0].dtype.itemsize
