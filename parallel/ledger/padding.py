"""Counts the elements of parameters as they travel: rows filled up to a multiple of the ranks, flat ones aligned."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from parallel.config import ParallelConfig
from parallel.ledger.parts import ParameterSpec, UnitSpec, num_shards
from parallel.traits import TRAITS

ALIGNMENT_BYTES = 16
"""FSDP1 lets each parameter of a flattened unit start at a multiple of this, in the dtype that is gathered."""


def padded(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of a tensor whose rows are filled up to a multiple of the ranks.

    Args:
        shape: Size per dim.
        ranks: Ranks that share the rows.
    """
    return -(-shape[0] // ranks) * ranks * prod(shape[1:])


def unit_elements(parameters: Sequence[ParameterSpec], config: ParallelConfig, tp_rank: int) -> int:
    """Elements of parameters that travel together, with all that fills them up.

    Args:
        parameters: Of one unit.
        config: The layout with every degree resolved.
        tp_rank: Place of the rank along `tp`.
    """
    shapes = [parameter.split(config.tp, tp_rank) for parameter in parameters]
    if not TRAITS[config.data_parallel].flattens:
        return sum(sent_elements(each, config, tp_rank) for each in parameters)
    end = flat_ranges(parameters, config, tp_rank)[-1].stop if shapes else 0
    return padded((end,), num_shards(config))


class UnitSizes(NamedTuple):
    """Elements of a unit on one rank of `tp`.

    Attributes:
        sent: As it is gathered.
        summed: As its gradients are.
        trained: Of its trained parameters, without what fills them up.
        last: Of the last of those.
        largest: Of its largest parameter.
    """

    sent: int
    summed: int
    trained: int
    last: int
    largest: int


class SizesOfUnits:
    """Counts elements of units, once for all that are alike: for identical blocks nothing takes longer."""

    def __init__(self, config: ParallelConfig, tp_rank: int) -> None:
        """Has counted none.

        Args:
            config: The layout with every degree resolved.
            tp_rank: Place of the rank along `tp`.
        """
        self._config, self._tp_rank = config, tp_rank
        self._known: dict[int, UnitSizes] = {}

    def of(self, unit: UnitSpec) -> UnitSizes:
        """Elements of a unit.

        Args:
            unit: The unit.
        """
        key = id(unit.kind)
        if key not in self._known:
            self._known[key] = self._count(unit)
        return self._known[key]

    def _count(self, unit: UnitSpec) -> UnitSizes:
        own, config, tp_rank = unit.parameters, self._config, self._tp_rank
        counts = [elements([each], config, tp_rank) for each in own]
        trained = [count for each, count in zip(own, counts, strict=True) if each.has_gradient]
        return UnitSizes(
            sent=unit_elements(own, config, tp_rank),
            summed=unit_elements([each for each in own if each.has_gradient], config, tp_rank),
            trained=sum(trained),
            last=trained[-1] if trained else 0,
            largest=max(counts, default=0),
        )


def sent_elements(parameter: ParameterSpec, config: ParallelConfig, tp_rank: int) -> int:
    """Elements that ranks gather of a parameter, with what fills up its rows.

    Args:
        parameter: Which.
        config: The layout with every degree resolved.
        tp_rank: Place of the rank along `tp`.
    """
    shape, shards = parameter.split(config.tp, tp_rank), num_shards(config) // parameter.ep
    return prod(shape) if splits_columns(parameter, config, tp_rank) else padded(shape, shards)


def splits_columns(parameter: ParameterSpec, config: ParallelConfig, tp_rank: int) -> bool:
    """Whether the second dim is sharded: that of experts which are too few for their ranks.

    Args:
        parameter: Which.
        config: The layout with every degree resolved.
        tp_rank: Place of the rank along `tp`.
    """
    shape, shards = parameter.split(config.tp, tp_rank), num_shards(config) // parameter.ep
    return parameter.ep > 1 and shape[0] % shards > 0 and shape[1] % shards == 0


def flat_ranges(parameters: Sequence[ParameterSpec], config: ParallelConfig, tp_rank: int) -> list[range]:
    """Where each parameter lies in its unit once that is flattened: each starts at an aligned address.

    Args:
        parameters: Of one unit.
        config: The layout with every degree resolved.
        tp_rank: Place of the rank along `tp`.
    """
    ranges: list[range] = []
    end = 0
    for parameter in parameters:
        dtype = config.precision.compute_dtype or parameter.dtype
        start = end + -end % (ALIGNMENT_BYTES // dtype.itemsize)
        end = start + prod(parameter.split(config.tp, tp_rank))
        ranges.append(range(start, end))
    return ranges


def elements(parameters: Sequence[ParameterSpec], config: ParallelConfig, tp_rank: int) -> int:
    """Elements of parameters on a rank of `tp`, before other sharding.

    Args:
        parameters: Any of them.
        config: The layout with every degree resolved.
        tp_rank: Place of the rank along `tp`.
    """
    return sum(prod(each.split(config.tp, tp_rank)) for each in parameters)
