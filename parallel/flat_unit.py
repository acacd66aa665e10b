"""Puts torch's `FullyShardedDataParallel` around a model's units."""

import functools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

# Private: FSDP1 has no public call that frees units which a forward without backward has left gathered.
from torch.distributed.fsdp._runtime_utils import _reshard

from parallel.config import Sharding
from parallel.plan import Unit
from parallel.precision import Precision
from parallel.units import kept_unit

STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    # Private by its name alone: torch documents it as the hybrid of shard_grad_op.
    "hybrid_shard_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
    "no_shard": ShardingStrategy.NO_SHARD,
}
KEEPING = {"full_shard": "shard_grad_op", "hybrid_shard": "hybrid_shard_zero2"}
"""The strategy that differs in that a unit stays gathered from forward to backward."""


class FlatUnit(FullyShardedDataParallel):
    """A unit that sums gradients, and that leaves no trace in the names of what it wraps.

    Attributes:
        fqns: Names of its parameters in the whole model, tied ones once.
    """

    fqns: tuple[str, ...] = ()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Itself, then what it wraps, under the same name."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def sum_gradients(self) -> None:
        """Adds gradients up over ranks: the loss is already divided by the tokens of the global batch."""
        # Private: the divisors of FSDP1's average. A communication hook could sum too, but hybrids take none.
        self._gradient_predivide_factor = self._gradient_postdivide_factor = 1

    def gathered(self) -> list[Tensor]:
        """The memory of its gathered parameters, where there is any; `no_shard` gathers nothing."""
        handle = self._handle
        # Private: whether a first forward has made room. Until then nothing is known of gathered parameters.
        if self._is_root is None or handle is None or not handle.uses_sharded_strategy or handle.needs_unshard():
            return []
        return [flat._full_param_padded for flat in self.params]

    def bounds(self, num_ranks: int) -> dict[str, tuple[int, ...]]:
        """Where the ranges of ranks begin within each parameter, and where the last one ends, by fqn.

        Args:
            num_ranks: Ranks that share the unit, each a range of as many elements.
        """
        found: dict[str, tuple[int, ...]] = {}
        for flat in self.params:
            fqns, start = iter(self.fqns), 0
            # Private: FSDP1 has no public account of what it has flattened, with what fills it up.
            for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
                if not is_padding:
                    edges = (rank * flat.numel() - start for rank in range(num_ranks + 1))
                    found[next(fqns)] = tuple(max(0, min(size, each)) for each in edges)
                start += size
        return found

    def reshard(self) -> None:
        """Frees its parameters if they are gathered."""
        if self.gathered():
            _reshard(self, self._handle, True)

    def show_parameters(self) -> None:
        """Shows the model's parameters again where a backward has left views in their place.

        With `no_shard` that is what happens to a unit of which nothing is trained: as its values lie where they should,
        torch takes it for done. At the next forward it would take the views for parameters that the user has set.
        """
        _reshard(self, self._handle, False)

    @property
    def has_gradient(self) -> bool:
        """Whether any of its parameters has a gradient, on any rank."""
        return any(flat.grad is not None for flat in self.params)


def wrap_units(
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    strategy: str,
    units: tuple[Unit, ...],
    sharding: Sharding,
    precision: Precision,
) -> list[FlatUnit]:
    """Flattens and shards each unit of one module, then the whole model, which takes the parameters that are left.

    Args:
        model: The whole model, with values.
        mesh: 1-D to shard, or to replicate with no_shard; 2-D to replicate over its first dim and shard over the other.
        device: Where to compute.
        strategy: What is sharded and when it is freed.
        units: Modules that are gathered together, inner ones first.
        sharding: How units are kept and prefetched.
        precision: Compute and reduce dtypes.

    Returns:
        The units, the whole model last.
    """
    shard = functools.partial(_shard, mesh=mesh, device=device, sharding=sharding, precision=precision)
    kept = kept_unit(units, sharding)
    wrapped: list[FlatUnit] = []
    taken: set[str] = set()
    for unit in units:
        if len(unit.modules) > 1:
            continue
        (fqn,) = unit.modules
        module = model.get_submodule(fqn)
        fqns = [name for each, _ in module.named_parameters() if (name := f"{fqn}.{each}") not in taken]
        taken.update(fqns)
        flat = shard(module, fqns, KEEPING.get(strategy, strategy) if unit is kept else strategy)
        owner, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(owner), name, flat)
        wrapped.append(flat)
    root = shard(model, [fqn for fqn, _ in model.named_parameters() if fqn not in taken], strategy)
    return [*wrapped, root]


def _shard(
    module: nn.Module,
    fqns: Iterable[str],
    strategy: str,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    sharding: Sharding,
    precision: Precision,
) -> FlatUnit:
    """One unit, which takes those parameters of a module that no unit within it has."""
    with _expected_warnings():
        unit = FlatUnit(
            module,
            device_mesh=mesh,
            device_id=device,  # else FSDP1 looks for a GPU
            use_orig_params=True,
            sharding_strategy=STRATEGIES[strategy],
            cpu_offload=CPUOffload(offload_params=sharding.cpu_offload),
            mixed_precision=MixedPrecision(
                param_dtype=precision.compute_dtype,
                reduce_dtype=precision.reduce_dtype,
                # Buffers keep their dtype, as under the other backends, and so do inputs: casting them would also round
                # the rotary tables, and activations take the weights' dtype by themselves.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=sharding.forward_prefetch > 0,
            limit_all_gathers=sharding.limit_all_gathers,
        )
    unit.fqns = tuple(fqns)
    unit.sum_gradients()
    return unit


@contextmanager
def _expected_warnings() -> Iterator[None]:
    """Silences torch's advice to use DDP instead of no_shard, which is a choice here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*`NO_SHARD`", category=FutureWarning)
        yield
