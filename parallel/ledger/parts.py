"""What a layout makes of a model's parameters, as data: units, splits over `tp`, and what stays gathered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from parallel.config import ParallelConfig
from parallel.expert_styles import EXPERT_DIMS
from parallel.plan import ParallelPlan, TensorParallelStyle, Unit, innermost, matching
from parallel.stages import cut, part_of_plan, stage_module
from parallel.traits import TRAITS
from parallel.units import choose_units, kept_unit, with_expert_units

# Along which dim `tp` splits weights of a style; a bias only along its first. Other styles split nothing.
_SPLIT: Mapping[TensorParallelStyle, int] = {
    "embedding": 0,
    "colwise": 0,
    "head": 0,
    "rowwise": 1,
    "weight_colwise": 0,
    "weight_rowwise": 1,
    "partial_colwise": 0,
    "partial_rowwise": 1,
}


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter of the whole model.

    Attributes:
        fqn: Its name.
        shape: Size per dim, unsharded.
        dtype: Type in which it is stored.
        trainable: Whether it is trained.
        has_gradient: Whether backward makes a gradient for it: it is trained, or flattened with what is.
        tp_dim: Dim that `tp` splits; None: every rank of `tp` holds it whole.
        ep: Ranks of `ep` that have a part of its first dim each, an expert or more.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    has_gradient: bool
    tp_dim: int | None
    ep: int = 1

    def split(self, tp: int, tp_rank: int) -> tuple[int, ...]:
        """Shape of the part that one rank of `tp` holds before any other sharding; the last ones may hold less.

        Args:
            tp: Ranks that share the matrix.
            tp_rank: The rank among them.
        """
        shape = (self.shape[0] // self.ep, *self.shape[1:])
        if self.tp_dim is None:
            return shape
        size = part(shape[self.tp_dim], tp, tp_rank)
        return (*shape[: self.tp_dim], size, *shape[self.tp_dim + 1 :])


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitSpec:
    """Parameters that travel together; equal to itself alone.

    Attributes:
        parameters: Tied ones once.
        kept: Whether it stays gathered from forward to backward.
        gathered_again: Whether it is gathered in backward.
    """

    parameters: tuple[ParameterSpec, ...]
    kept: bool
    gathered_again: bool

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """What tells it from units of other sizes or other treatment; those of identical blocks share one object."""
        own = (
            (each.shape, each.dtype, each.trainable, each.has_gradient, each.tp_dim, each.ep)
            for each in self.parameters
        )
        kind = (*own, self.kept, self.gathered_again)
        return _KINDS.setdefault(kind, kind)


_KINDS: dict[tuple[object, ...], tuple[object, ...]] = {}


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelParts:
    """A model in a layout; equal to itself alone.

    Attributes:
        config: The layout with every degree resolved.
        plan: What the rank's part of the model declares.
        styles: Style of each module that `tp` touches, by fqn.
        units: Sharding units in the order in which they run; the last is the root, which holds what is left. Each stage
            of a pipeline has a root.
        whole: What the whole model declares.
        pp_rank: Place of the rank along `pp`.
    """

    config: ParallelConfig
    plan: ParallelPlan
    styles: Mapping[str, TensorParallelStyle]
    units: tuple[UnitSpec, ...]
    whole: ParallelPlan
    pp_rank: int

    @cached_property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """All parameters, unit after unit."""
        return tuple(parameter for unit in self.units for parameter in unit.parameters)


def model_parts(model: nn.Module, config: ParallelConfig, plan: ParallelPlan, pp_rank: int = 0) -> ModelParts:
    """Describes what one rank has of a model in a layout.

    Args:
        model: The whole model as it is before `parallelize`, which may be on meta.
        config: The layout with every degree resolved.
        plan: What the model declares.
        pp_rank: Place of the rank along `pp`.
    """
    if config.pp == 1:
        return _of_part(model, config, plan)
    stages = [stage for stage in cut(plan, config) if stage.rank == pp_rank]
    parts = [_of_part(stage_module(model, plan, stage), config, part_of_plan(plan, stage.modules)) for stage in stages]
    return ModelParts(
        config=config,
        plan=part_of_plan(plan, [fqn for stage in stages for fqn in stage.modules]),
        styles={fqn: style for part in parts for fqn, style in part.styles.items()},
        units=tuple(unit for part in parts for unit in part.units),
        whole=plan,
        pp_rank=pp_rank,
    )


def _of_part(model: nn.Module, config: ParallelConfig, plan: ParallelPlan) -> ModelParts:
    """The model, or one stage of a pipeline."""
    flattens = TRAITS[config.data_parallel].flattens
    chosen = choose_units(model, plan, config.sharding)
    if config.ep > 1:
        chosen = with_expert_units(model, plan, chosen)
    # A flattened unit is one module; what is in others is left to the unit around them.
    units = [unit for unit in chosen if len(unit.modules) == 1 or not flattens]
    aliases = {name for names in plan.tied for name in names[1:]}
    modules = dict(model.named_modules())
    styles = {fqn: style for pattern, style in plan.tensor_parallel.items() for fqn in matching(pattern, modules)}
    places = {name: place for place, unit in enumerate(units) for name in unit.modules}
    members: list[list[ParameterSpec]] = [[] for _ in (*units, "root")]
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if fqn not in aliases:
            around = innermost(fqn, places)
            within = len(units) if around is None else places[around]
            is_split = within < len(units) and units[within].view == "expert_fsdp"
            spec = _parameter_spec(fqn, parameter, styles.get(fqn.rpartition(".")[0]))
            members[within].append(replace(spec, ep=config.ep) if is_split else spec)
    if flattens:
        members = [_flattened(own) for own in members]
    kept = kept_unit(chosen, config.sharding)
    specs = [_unit_spec(unit, own, unit is kept, config) for unit, own in zip(units, members, strict=False)]
    # `fully_shard` prefetches, so that it gathers the last of them nevertheless.
    specs = _without_backward(specs, ahead=0 if flattens else config.sharding.backward_prefetch or 1)
    # The root is needed again as soon as backward starts.
    specs.append(UnitSpec(parameters=tuple(members[-1]), kept=True, gathered_again=False))
    return ModelParts(config=config, plan=plan, styles=styles, units=tuple(specs), whole=plan, pp_rank=0)


def _flattened(own: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """Parameters that are parts of one, which has a gradient if any of them is trained."""
    is_trained = any(each.trainable for each in own)
    return [replace(each, has_gradient=is_trained) for each in own]


def _parameter_spec(fqn: str, parameter: nn.Parameter, style: TensorParallelStyle | None) -> ParameterSpec:
    tp_dim = _SPLIT.get(style) if style is not None else None
    if style == "experts":
        tp_dim = EXPERT_DIMS[fqn.rpartition(".")[2]]
    return ParameterSpec(
        fqn=fqn,
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        trainable=parameter.requires_grad,
        has_gradient=parameter.requires_grad,
        tp_dim=tp_dim if tp_dim is not None and tp_dim < parameter.dim() else None,
    )


def _unit_spec(unit: Unit, own: Sequence[ParameterSpec], stays: bool, config: ParallelConfig) -> UnitSpec:
    """A unit, which `stays` gathered by choice or by the strategy; `fully_shard` frees what backward does without."""
    strategy = config.resolved_strategy
    needed = unit.backward_needs_weights or TRAITS[config.data_parallel].flattens
    # Within a pipeline every micro-batch would gather everything anew.
    stays = stays or strategy not in ("full_shard", "hybrid_shard") or config.pp > 1
    is_kept = strategy == "no_shard" or (needed and stays)
    return UnitSpec(parameters=tuple(own), kept=is_kept, gathered_again=needed and not is_kept)


def _without_backward(specs: Sequence[UnitSpec], ahead: int) -> list[UnitSpec]:
    """Units as they are gathered again: those before the first trainable parameter have no backward.

    Args:
        specs: In the order of forward.
        ahead: How many before the next one are gathered with it in backward.
    """
    first = next((index for index, spec in enumerate(specs) if any(p.trainable for p in spec.parameters)), len(specs))
    return [
        replace(spec, gathered_again=spec.gathered_again and index >= first - ahead) for index, spec in enumerate(specs)
    ]


def part(size: int, ranks: int, rank: int) -> int:
    """Rows of a rank where each takes as many as the first, as torch chunks: the last ones get less or none.

    Args:
        size: Rows in all.
        ranks: Ranks that share them.
        rank: The rank.
    """
    rows = -(-size // ranks)
    return max(0, min(rows, size - rank * rows))


def num_shards(config: ParallelConfig) -> int:
    """Ranks that share one copy of the parameters.

    Args:
        config: The layout with every degree resolved.
    """
    return 1 if config.resolved_strategy == "no_shard" else config.dp_shard * config.cp


def is_unit_based(config: ParallelConfig) -> bool:
    """Whether parameters travel unit by unit: DDP takes no DTensors and sees no stages, so units replace its buckets.

    Args:
        config: The layout.
    """
    return TRAITS[config.data_parallel].shards or (
        TRAITS[config.data_parallel].has_buckets and (config.tp > 1 or config.pp > 1)
    )


def num_reductions(config: ParallelConfig, num_micro_batches: int) -> int:
    """How often a step sums gradients over ranks.

    Args:
        config: The layout.
        num_micro_batches: Micro-batches of a rank.
    """
    traits = TRAITS[config.data_parallel]
    # Flattened units that are kept whole would sum again what they have summed before.
    once = not traits.sums_each_micro_batch or (traits.flattens and num_shards(config) == 1)
    return 1 if once or config.reduce_gradients == "last" or config.pp > 1 else num_micro_batches
