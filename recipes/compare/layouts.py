"""Names layouts in a compact text form, and lists those that a machine can run."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from parallel import Buckets, ParallelConfig, Precision, Sharding
from parallel.config import DEGREES, Strategy
from parallel.layout import resolve
from parallel.parallelize import BACKENDS
from parallel.traits import TRAITS
from recipes.recipe import Recipe
from recipes.structure import structure

FORM = "BACKEND[:STRATEGY][:FIELD=VALUE,...][@RANKS], for example fsdp2:full_shard:dp_shard=2,tp=2 or ddp@4"
DEFAULT_RANKS = (2, 4)
_PARTS = {"precision": Precision, "sharding": Sharding, "buckets": Buckets}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout to compare.

    Attributes:
        name: In the text form.
        config: The layout.
        num_ranks: Ranks that it runs on.
    """

    name: str
    config: ParallelConfig
    num_ranks: int


def read_layout(text: str, base: ParallelConfig) -> Layout:
    """The layout that a text names.

    Args:
        text: In the form `FORM`; fields are those of ParallelConfig, Precision, Sharding and Buckets.
        base: Where precision, activation checkpointing and compilation come from.

    Raises:
        ValueError: If the text has another form, or names what is unknown or does not go together.
    """
    body, at, ranks = text.partition("@")
    backend, *rest = body.split(":")
    strategy = rest.pop(0) if rest and rest[0] in get_args(Strategy) else None
    if len(rest) > 1 or (rest and "=" not in rest[0]) or (at and not ranks.isdigit()):
        raise ValueError(f"layout {text!r} does not have the form {FORM}; strategies: {', '.join(get_args(Strategy))}")
    if backend not in TRAITS:
        raise ValueError(f"layout {text!r}: unknown backend {backend!r}; legal: {', '.join(TRAITS)}")
    values: dict[str, Any] = {"data_parallel": backend, "strategy": strategy}
    for item in rest[0].split(",") if rest else ():
        name, _, word = item.partition("=")
        part, kind = _field(text, name)
        (values.setdefault(part, {}) if part else values)[name] = _value(word, kind)
    try:
        config = _config(values, base)
        return Layout(name=text, config=config, num_ranks=_num_ranks(config, int(ranks) if at else None))
    except ValueError as error:
        raise ValueError(f"layout {text!r}: {error}") from error


def default_layouts(recipe: Recipe, max_ranks: int | None) -> list[Layout]:
    """Every backend and strategy at 2 and at 4 ranks, and tensor parallelism with each backend that composes with it.

    Args:
        recipe: What they are to run; layouts that it cannot have are left out.
        max_ranks: Most ranks that the machine can run; None: any number.
    """
    texts = dict.fromkeys(text for ranks in DEFAULT_RANKS for text in _texts(ranks))
    # Default buckets may hold the whole model, which hides that they are sent while backward runs.
    texts[f"ddp:bucket_cap_mb={_mib(recipe) / 8:.2g}@2"] = None
    layouts: list[Layout] = []
    for text in texts:
        try:
            layout = read_layout(text, recipe.parallel)
            dataclasses.replace(recipe, parallel=layout.config).check_layout(layout.num_ranks)
        except ValueError:
            continue
        if max_ranks is None or layout.num_ranks <= max_ranks:
            layouts.append(layout)
    return layouts


def _texts(ranks: int) -> Iterator[str]:
    for backend in BACKENDS:
        if TRAITS[backend].one_process:
            yield backend
        elif TRAITS[backend].shards:
            for strategy in get_args(Strategy):
                groups = f":dp_replicate=2,dp_shard={ranks // 2}" if strategy.startswith("hybrid") else ""
                # Of one rank a group a hybrid shards nothing.
                if not groups or ranks > 2:
                    yield f"{backend}:{strategy}{groups}@{ranks}"
        else:
            yield f"{backend}@{ranks}"
        composes = "tp" not in TRAITS[backend].refused_axes and not TRAITS[backend].one_process
        # Of tp alone one row is enough: nothing is left for a backend to do.
        if composes and (ranks > 2 or backend == ParallelConfig().data_parallel):
            yield f"{backend}:tp=2@{ranks}"


def sweep_layouts(knob: str, recipe: Recipe) -> list[Layout]:
    """Layouts that differ in one knob.

    Args:
        knob: A name of `SWEEPS`.
        recipe: What they are to run; sizes follow from its model.
    """
    return [read_layout(text, recipe.parallel) for text in SWEEPS[knob](recipe)]


def _bucket_sizes(recipe: Recipe) -> list[str]:
    return [f"ddp:bucket_cap_mb={_mib(recipe) / share:.3g}@2" for share in (32, 16, 8, 4, 2, 0.5)]


def _mib(recipe: Recipe) -> float:
    """Size of the gradients in float32."""
    return recipe.model.num_parameters * 4 / 2**20


def _unit_sizes(recipe: Recipe) -> list[str]:
    sizes = (recipe.model.num_parameters // share for share in (64, 16, 4))
    by_size = [f"fsdp2:full_shard:units=size,unit_min_parameters={size}@2" for size in sizes]
    return [*by_size, "fsdp2:full_shard:units=block@2", "fsdp2:full_shard:units=model@2"]


SWEEPS = {
    "bucket_cap_mb": _bucket_sizes,
    "units": _unit_sizes,
    "prefetch": lambda _: [
        f"fsdp2:full_shard:forward_prefetch={ahead},backward_prefetch={ahead}@2" for ahead in (0, 1, 2, 3)
    ],
    "reshard": lambda _: [
        "fsdp2:full_shard@4",
        "fsdp2:full_shard:reshard_group=2@4",
        "fsdp2:full_shard:keep_last_unit=true@4",
        "fsdp2:shard_grad_op@4",
    ],
}
"""For each knob the layouts over which it is swept."""


def _field(text: str, name: str) -> tuple[str, Any]:
    """The part of a config that has a field (empty for ParallelConfig itself), and the field's type."""
    for part, kind in {"": ParallelConfig, **_PARTS}.items():
        hints = get_type_hints(kind)
        if name in hints and name not in _PARTS:
            return part, hints[name]
    raise ValueError(f"layout {text!r}: no field {name!r} in ParallelConfig, Precision, Sharding or Buckets")


def _value(word: str, kind: Any) -> Any:
    members = (kind, *get_args(kind))
    if word in ("None", "none") and type(None) in members:
        return None
    if bool in members and word.lower() in ("true", "false"):
        return word.lower() == "true"
    for number in (int, float):
        if number in members:
            try:
                return number(word)
            except ValueError:
                continue
    return word


def _config(values: dict[str, Any], base: ParallelConfig) -> ParallelConfig:
    """A config of those fields; what is neither a degree nor a part of the choice of a backend is the recipe's."""
    kept = [each.name for each in dataclasses.fields(base) if each.name.startswith("activation_checkpoint")]
    plain = {name: getattr(base, name) for name in ("sequence_parallel", "loss_parallel", "compile", *kept)} | values
    plain["precision"] = dataclasses.asdict(base.precision) | values.get("precision", {})
    return structure(plain, ParallelConfig)


def _num_ranks(config: ParallelConfig, asked: int | None) -> int:
    """Ranks of a layout: as the text says, or the product of degrees, or 2 where nothing says."""
    if TRAITS[config.data_parallel].one_process:
        num_ranks = asked or 1
    else:
        product = 1
        for name in DEGREES[:-1]:
            product *= max(1, getattr(config, name))
        num_ranks = asked or max(product, DEFAULT_RANKS[0])
    resolve(config, num_ranks)
    return num_ranks
