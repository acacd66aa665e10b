"""What a model declares about itself as data, so that `parallel` can split it without knowing it."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn

TensorParallelStyle = Literal[
    "embedding",
    "gather_input",
    "colwise",
    "rowwise",
    "norm",
    "head_norm",
    "head",
    "expert_layer",
    "router",
    "experts",
    "partial_colwise",
    "partial_rowwise",
    "partial_replicate",
    "weight_replicate",
    "weight_colwise",
    "weight_rowwise",
]
"""How a module splits over the `tp` axis; `parallel/tensor_parallel.py` says what each one does."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Counts and widths of a decoder; checks, ledger and planner compute from these and import no model.

    Attributes:
        num_layers: Blocks.
        width: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        head_dim: Components of a head.
        feed_forward_width: Width between the projections of a dense feed-forward layer.
        vocab_size: Entries of the vocabulary.
        tied_embeddings: Whether embedding and head are one matrix.
        num_experts: Experts of a layer that has some; 0: every layer is dense.
        num_experts_per_token: Experts that a token is sent to.
        expert_width: Width between the projections of one expert. None: feed_forward_width.
        shared_expert_width: Width of the expert that every token passes beside those; 0: there is none.
        num_dense_layers: Layers without experts in a model that has some.
        max_sequence_length: Most tokens of a sequence. None: no limit is known.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feed_forward_width: int
    vocab_size: int
    tied_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_width: int | None = None
    shared_expert_width: int = 0
    num_dense_layers: int = 0
    max_sequence_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Modules whose parameters travel in one all-gather.

    Attributes:
        modules: Their fqns, in the order in which they run.
        view: The view of the mesh that shards their parameters.
        backward_needs_weights: False where backward does without the values of their parameters, as that of an
            embedding does; they are then not kept or gathered for it. A forward that does keep one for backward, as
            a head that is asked for logits, is noticed and costs a gather.
    """

    modules: tuple[str, ...]
    view: str = "fsdp"
    backward_needs_weights: bool = True


@dataclass(frozen=True, kw_only=True)
class Block:
    """A repeated layer.

    Attributes:
        fqn: Its name in the whole model.
        cost: Forward FLOPs for one token, attention over the sequence left out.
        has_experts: Whether it counts the tokens that come to its experts.
        adds_loss: Whether it adds to a loss that models hand on beside the residual stream.
    """

    fqn: str
    cost: float
    has_experts: bool = False
    adds_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """What a model says of itself.

    Attributes:
        shape: Counts and widths.
        tensor_parallel: Style of each module that tensor parallelism touches; a key is an fqn in which
            `*` stands for one name.
        units: Sharding units besides the root, which takes what is left.
        blocks: Repeated layers in the order in which they run.
        first: What runs before the first block and can be None in a model that starts from a residual stream.
        last: What runs after the last block and can be None in a model that returns the residual stream.
        tied: Groups of parameter fqns that are one parameter; the first is the canonical name.
        attention_cores: Modules in which the tokens of a sequence meet, by fqn pattern, which context parallel
            replaces; they are called as its `AttentionCore` says.
        experts: Modules whose parameters have experts along their first dim, by fqn pattern; expert parallel gives each
            rank some of them.
        dispatches: Modules that bring tokens to experts, which expert parallel replaces; they are called as its
            `Dispatch` says.
        row_sums: Modules that context parallel replaces too: given sums over a row's tokens, which have no gradient,
            they return those over the whole row.
        of_whole_rows: Modules that take something of each token of whole rows and give something of each, without a
            gradient; context parallel brings them the other ranks' tokens.
    """

    shape: ModelShape
    tensor_parallel: Mapping[str, TensorParallelStyle] = field(default_factory=dict)
    units: tuple[Unit, ...] = ()
    blocks: tuple[Block, ...] = ()
    first: tuple[Block, ...] = ()
    last: tuple[Block, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    attention_cores: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    dispatches: tuple[str, ...] = ()
    row_sums: tuple[str, ...] = ()
    of_whole_rows: tuple[str, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Holds every name of the plan against the model.

        Raises:
            ValueError: If a key matches no module, a unit or block names none, a style is unknown, a module
                stands in two units, tied names are not one parameter or lie in different units, or names that are
                one parameter are not called tied.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        for pattern, style in self.tensor_parallel.items():
            if style not in get_args(TensorParallelStyle):
                raise ValueError(
                    f"unknown tensor-parallel style {style!r} for {pattern!r}; legal: {get_args(TensorParallelStyle)}"
                )
            if not matching(pattern, modules):
                raise ValueError(f"tensor-parallel key {pattern!r} matches no module of {type(model).__name__}")
        replaced = self.attention_cores + self.dispatches + self.row_sums + self.of_whole_rows
        for pattern in self.experts + replaced:
            if not matching(pattern, modules):
                raise ValueError(f"the plan's {pattern!r} matches no module of {type(model).__name__}")
        in_units = [fqn for unit in self.units for fqn in unit.modules]
        for fqn in in_units + [block.fqn for block in (*self.first, *self.blocks, *self.last)]:
            if fqn not in modules:
                raise ValueError(f"the plan names {fqn!r}, but {type(model).__name__} has no such module")
        twice = {fqn for fqn in in_units if in_units.count(fqn) > 1}
        if twice:
            raise ValueError(f"modules {sorted(twice)} stand in more than one sharding unit")
        self._check_tied(model)

    def _check_tied(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for names in self.tied:
            missing = [name for name in names if name not in parameters]
            if missing:
                raise ValueError(f"tied parameters {missing} do not exist in {type(model).__name__}")
            if len({id(parameters[name]) for name in names}) != 1:
                raise ValueError(f"the plan calls {names} tied, but in the model they are different parameters")
            units = {name: self._unit_of(name) for name in names}
            if len(set(units.values())) != 1:
                raise ValueError(f"tied parameters must lie in one sharding unit, but the plan puts them in {units}")
        names_of: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            names_of.setdefault(id(parameter), []).append(name)
        for same in names_of.values():
            if len(same) > 1 and not any(set(same) <= set(names) for names in self.tied):
                raise ValueError(f"{same} are one parameter, which splitting would untie; list them in the plan's tied")

    def _unit_of(self, parameter: str) -> tuple[str, ...]:
        """Modules of the innermost unit that holds a parameter; none for the root."""
        around = [
            (len(fqn), unit.modules) for unit in self.units for fqn in unit.modules if parameter.startswith(f"{fqn}.")
        ]
        return max(around, default=(0, ()))[1]


def matching(pattern: str, fqns: Mapping[str, object]) -> list[str]:
    """The fqns that a pattern names; `*` stands for one name between dots.

    Args:
        pattern: An fqn, such as `blocks.*.attention`.
        fqns: Names to search.
    """
    parts = pattern.split(".")
    return [
        fqn
        for fqn in fqns
        if fqn.count(".") == pattern.count(".")
        and all(fnmatchcase(name, part) for name, part in zip(fqn.split("."), parts, strict=True))
    ]


def innermost(fqn: str, modules: Container[str]) -> str | None:
    """The innermost of some modules around a module or parameter, or itself; None if there is none.

    Args:
        fqn: Its name.
        modules: Names of modules.
    """
    while fqn and fqn not in modules:
        fqn = fqn.rpartition(".")[0]
    return fqn or None
