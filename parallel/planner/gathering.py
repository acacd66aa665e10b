"""Predicts how long parameters and gradients travel in a step, and what of that nothing hides."""

from typing import NamedTuple

from parallel.collective_ops import Kind
from parallel.config import ParallelConfig
from parallel.ledger.parts import num_shards
from parallel.planner.candidate import PLAIN, Candidate, Options
from parallel.planner.constants import Constants
from parallel.planner.costs import BFLOAT16, FLOAT32, ModelCosts
from parallel.planner.hardware import Gpu
from parallel.planner.links import GB, Link
from parallel.planner.pipeline import StageLoad
from parallel.planner.states import own_root
from parallel.planner.waiting import Ranks, exposed
from parallel.traits import TRAITS

MIB = 2**20
KEEPS = ("shard_grad_op", "zero2")
"""How the names of strategies end that keep parameters from forward to backward."""


class Work(NamedTuple):
    """What a rank computes in a step, behind which parameters and gradients can travel.

    Attributes:
        load: What the rank runs that holds most of the model.
        forward_s: Forward of one block for one micro-batch.
        behind_s: All of it, with waiting for `tp`.
    """

    load: StageLoad
    forward_s: float
    behind_s: float


class Held(NamedTuple):
    """Elements that a rank gathers or sums, those of all ranks that share them.

    Attributes:
        blocks: Of its blocks, experts that `ep` carves out left out.
        routed: Of its experts where `ep` carves them out.
        root: Of embedding and head.
        units: Units that they make.
    """

    blocks: float
    routed: float
    root: float
    units: float

    def times(self, share: float) -> "Held":
        """As many units of which each has a share of the elements.

        Args:
            share: From 0 to 1.
        """
        return self._replace(blocks=share * self.blocks, routed=share * self.routed, root=share * self.root)


def elements_held(costs: ModelCosts, config: ParallelConfig, options: Options, load: StageLoad) -> Held:
    """What the rank of a pipeline that holds most has to gather.

    Args:
        costs: The model.
        config: The layout.
        options: How it groups and sends.
        load: What that rank runs.
    """
    own, routed = costs.part_of_block(config.tp), 0.0
    if config.ep > 1:
        own, routed = own - costs.routed(1) / config.tp, costs.routed(config.ep) / config.tp
    blocks, root = load.num_blocks, own_root(costs, config, load)
    by_size = parts_of_block(costs, options.unit_min_parameters) if options.units == "size" else 1
    return Held(blocks * own, blocks * routed, root, 1 if options.units == "model" else blocks * by_size + 2)


def parts_of_block(costs: ModelCosts, min_parameters: int) -> int:
    """Units that a block makes where they are chosen by size: attention beside the matrices that are large enough.

    Args:
        costs: The model.
        min_parameters: Least elements of a unit.
    """
    return 4 if costs.width * costs.wide >= min_parameters else 2


def data_parallel_s(
    costs: ModelCosts, candidate: Candidate, options: Options, work: Work, ranks: Ranks, constants: Constants
) -> float:
    """Seconds that a step is longer for sending parameters and gradients.

    Args:
        costs: The model.
        candidate: The layout and what varies within it, options left out.
        options: How it groups and sends.
        work: What hides them.
        ranks: The links of the layout.
        constants: How well collectives overlap.
    """
    config, traits, itemsize = candidate.config, TRAITS[candidate.config.data_parallel], candidate.itemsize
    held = elements_held(costs, config, options, work.load)
    times = candidate.num_micro_batches
    reduced = FLOAT32 if itemsize == FLOAT32 or options.reduce == "float32" else BFLOAT16
    once = candidate.reduce_gradients == "last" or config.pp > 1 or not traits.sums_each_micro_batch
    reductions = 1 if once else times
    # The gradient of a flattened unit is whole, whatever of it is trained.
    summed = held if traits.flattens else held.times(costs.trained)
    if config.resolved_strategy == "no_shard":
        return _whole_s(options, summed, reductions * reduced, work, ranks, constants)
    # FSDP1 frees what forward kept when it sums gradients.
    stays = config.pp > 1 or (traits.flattens and once and config.resolved_strategy.endswith(KEEPS))
    gathers = 1 if stays else times
    sent_s = gathers * _gathers_s(config, options, held, itemsize, ranks, constants)
    sent_s += reductions * _over_shards(summed, "reduce_scatter", reduced, ranks, held.units)
    part = reduced * (summed.blocks + summed.root) / num_shards(config)
    part += reduced * summed.routed / ranks.experts.ranks
    sent_s += reductions * ranks.replicas.time_s("all_reduce", part, held.units)
    if options.units == "model":
        # One unit has to be there before anything is computed, and its gradient is complete when nothing is left.
        return sent_s
    # The head's unit is gathered behind as many blocks as prefetching looks ahead.
    ahead = max(1, options.prefetch) * work.forward_s
    late_s = gathers * max(0.0, ranks.fsdp.time_s("all_gather", itemsize * costs.head / config.tp, 1) - ahead)
    hidden_s = constants.interference * min(sent_s, work.behind_s)
    return max(exposed(sent_s, work.behind_s, constants), hidden_s + late_s)


def _gathers_s(
    config: ParallelConfig, options: Options, held: Held, itemsize: int, ranks: Ranks, constants: Constants
) -> float:
    """Gathers of one micro-batch: all units in forward, and in backward those that are freed in between."""
    traits = TRAITS[config.data_parallel]
    sent_s = _over_shards(held, "all_gather", itemsize, ranks, held.units)
    if config.pp > 1 or config.resolved_strategy not in ("full_shard", "hybrid_shard"):
        return sent_s
    if options.units == "model":
        # Experts that `ep` carves out are units nevertheless.
        return sent_s + (ranks.experts.time_s("all_gather", itemsize * held.routed) if held.routed else 0.0)
    # Of block units embedding and head are not gathered for backward, which needs none of their weights.
    again = held if traits.flattens or options.units == "size" else held._replace(root=0.0, units=held.units - 2)
    if options.reshard_group is None:
        return sent_s + _over_shards(again, "all_gather", itemsize, ranks, again.units)
    near = Link(options.reshard_group, config.tp, ranks.gpu, constants)
    sent_s += near.time_s("all_gather", itemsize * (again.blocks + again.root), again.units)
    # Experts that `ep` carves out are kept by no group.
    return sent_s + (ranks.experts.time_s("all_gather", itemsize * again.routed, again.units) if again.routed else 0.0)


def _over_shards(held: Held, kind: Kind, itemsize: int, ranks: Ranks, count: float) -> float:
    """Time of collectives over the ranks that share parameters; experts have ranks of their own."""
    sent_s = ranks.fsdp.time_s(kind, itemsize * (held.blocks + held.root), count)
    if held.routed:
        sent_s += ranks.experts.time_s(kind, itemsize * held.routed, held.units)
    return sent_s


def _whole_s(
    options: Options, summed: Held, bytes_of_each: float, work: Work, ranks: Ranks, constants: Constants
) -> float:
    """Gradients of whole parameters, in buckets of ddp or in units; zero1 then sends the parameters that changed."""
    config, over = ranks.config, ranks.replicas
    traits = TRAITS[config.data_parallel]
    if over.ranks == 1:
        return 0.0
    sent = bytes_of_each * (summed.blocks + summed.routed + summed.root)
    buckets = traits.has_buckets and config.tp == config.pp == 1
    size = min(sent, options.bucket_cap_mb * MIB)
    count = max(1.0, sent / size) if buckets else summed.units
    sent_s = over.time_s("all_reduce", sent, count)
    # The last bucket is full when nothing is left to compute.
    wait_s = over.time_s("all_reduce", size, 1) if buckets else 0.0
    wait_s = max(exposed(sent_s, work.behind_s, constants), constants.interference * sent_s + wait_s)
    if traits.splits_optimizer_rows:
        # After the optimizer nothing runs behind which parameters could travel.
        wait_s += over.time_s("all_gather", FLOAT32 * (summed.blocks + summed.root), summed.units)
    return wait_s


def host_s(costs: ModelCosts, candidate: Candidate, load: StageLoad, gpu: Gpu) -> float:
    """Seconds that a step is longer for states in host memory: shards come and gradients go, and AdamW runs there.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        load: What the rank runs.
        gpu: Its link to the host and that one's memory.
    """
    if not candidate.config.sharding.cpu_offload:
        return 0.0
    held = elements_held(costs, candidate.config, PLAIN, load)
    own = (held.blocks + held.root) / num_shards(candidate.config)
    own += held.routed * candidate.config.ep / num_shards(candidate.config)
    times = candidate.num_micro_batches if candidate.config.pp == 1 else 1
    gradients = costs.trained * (1 if candidate.reduce_gradients == "last" else times)
    moved = FLOAT32 * own * (2 * times + gradients)
    # AdamW reads parameter, gradient and moments, and writes parameter and moments.
    return moved / (gpu.host_link_gb_per_s * GB) + 7 * FLOAT32 * costs.trained * own / (gpu.host_gb_per_s * GB)
