"""Predicts the peak memory of a rank in closed form."""

from typing import Literal, NamedTuple

from parallel.ledger.parts import num_shards
from parallel.planner.candidate import Candidate
from parallel.planner.constants import Constants
from parallel.planner.costs import FLOAT32, KEEP_ALL, ModelCosts, kept_bytes
from parallel.planner.gathering import parts_of_block
from parallel.planner.pipeline import StageLoad, stage_loads
from parallel.planner.states import own_elements, predict_states
from parallel.traits import TRAITS

Logits = Literal["chunked", "eager"]
"""How the loss holds logits: those of a chunk of tokens, as this toolkit's head does, or all of them."""

CHUNK_TOKENS = 1024
"""Tokens of a chunk; the models' heads on GPUs have the same."""
EAGER_BYTES, EAGER_BYTES_OF_PARTS = 12, 16
"""Bytes of each logit in an eager float32 cross-entropy, and where ranks of `tp` have parts of the vocabulary."""
UNITS_IN_FLIGHT = 3
"""Gathered units at a time in backward: the current one, the prefetched one and the copy that it is gathered into."""


class Memory(NamedTuple):
    """Bytes of one rank at the moment when it holds most.

    Attributes:
        moment: `loss`, `backward` (in the last block) or `step` (all gradients are there).
        parameters: As stored.
        gradients: Summed or not.
        optimizer_state: AdamW's moments.
        unsharded: Gathered parameters and buffers of collectives.
        activations: Kept for backward, and of the block that runs.
        logits: Of the loss.
        reserved: All of it with what the caching allocator holds beyond.
        host: In the host's memory; no part of the others.
    """

    moment: str
    parameters: float
    gradients: float
    optimizer_state: float
    unsharded: float
    activations: float
    logits: float
    reserved: float
    host: float

    @property
    def allocated(self) -> float:
        """The sum of the parts."""
        return sum(self[1:7])


def predict_memory(
    costs: ModelCosts, candidate: Candidate, sequence_length: int, constants: Constants, logits: Logits = "chunked"
) -> Memory:
    """The peak of the rank that holds most.

    Parameters, gradients and moments are those of `parallel.planner.states`.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
        sequence_length: Tokens of a sequence.
        constants: What the allocator reserves.
        logits: How the loss holds logits.
    """
    num_tokens = candidate.micro_batch * sequence_length // candidate.config.cp
    return max(
        (
            _peak_of_stage(costs, candidate, load, num_tokens, constants, logits)
            for load in stage_loads(costs, candidate.config, candidate.num_micro_batches)
        ),
        key=lambda memory: memory.reserved,
    )


def _peak_of_stage(
    costs: ModelCosts, candidate: Candidate, load: StageLoad, num_tokens: int, constants: Constants, logits: Logits
) -> Memory:
    config = candidate.config
    tp, shards, itemsize = config.tp, num_shards(config), candidate.itemsize
    embedding = costs.embedding if load.has_embedding else 0
    unit, own = largest_unit(costs, candidate), own_elements(costs, config, load)
    stored, summed_once, moments = predict_states(costs, config, load)
    # Gradients that are summed once a step stay whole until then.
    once = candidate.reduce_gradients == "last" and (candidate.num_micro_batches > 1 or config.pp > 1)
    gradients = summed_once * (shards if once else 1)
    earlier = gradients if once or candidate.num_micro_batches > 1 else 0.0
    host = 0.0
    if config.sharding.cpu_offload:
        host, stored, moments = stored + moments + summed_once, 0.0, 0.0
        gradients, earlier = (gradients, earlier) if once else (0.0, 0.0)

    whole, in_flight = _gathered(costs, candidate, load, own, unit)
    reduced = FLOAT32 if itemsize == FLOAT32 or candidate.options.reduce == "float32" else itemsize
    exchange = costs.trained * (itemsize + reduced if shards > 1 else itemsize) * unit
    head = (costs.head or costs.embedding) / tp if load.has_head else 0.0
    kept, running, stream = _activations(costs, candidate, load, num_tokens, itemsize)
    loss = _logit_bytes(costs, num_tokens, tp, config.loss_parallel, itemsize, logits) if load.has_head else 0.0
    frees = in_flight > 0
    summed = FLOAT32 * costs.trained
    moments_of_step = (
        ("loss", earlier, whole + (itemsize * (head + unit) if frees else 0.0), kept + 4 * stream, loss),
        (
            "backward",
            max(earlier, summed * unit / shards),
            whole + in_flight + exchange,
            kept + running,
            0.0,
        ),
        ("step", gradients, whole + ((itemsize if frees else 0) + summed) * embedding / tp, 0.0, 0.0),
    )
    memories = (
        Memory(moment, stored, held, moments, unsharded, activations, in_loss, 0.0, host)
        for moment, held, unsharded, activations, in_loss in moments_of_step
    )
    peak = max(memories, key=lambda memory: memory.allocated)
    return peak._replace(reserved=peak.allocated * (1 + constants.reserved_share))


def largest_unit(costs: ModelCosts, candidate: Candidate) -> float:
    """Elements of the largest unit of blocks that a rank gathers.

    Args:
        costs: The model.
        candidate: The layout and what varies within it.
    """
    config = candidate.config
    block = costs.part_of_block(config.tp) + (costs.routed(config.ep) - costs.routed(1)) / config.tp
    if candidate.options.units != "size":
        return block
    parts = parts_of_block(costs, candidate.options.unit_min_parameters)
    feed_forward = costs.width * costs.wide / config.tp
    attention = 2 * costs.width * (costs.query_width + costs.kv_width) / config.tp
    return max(attention, feed_forward if parts > 2 else 3 * feed_forward)


def _gathered(costs: ModelCosts, candidate: Candidate, load: StageLoad, own: float, unit: float) -> tuple[float, float]:
    """Bytes of parameters that stay gathered through a step, and of those that come and go in backward."""
    config, options, itemsize = candidate.config, candidate.options, candidate.itemsize
    stays = config.pp > 1 or config.resolved_strategy not in ("full_shard", "hybrid_shard") or options.units == "model"
    if stays:
        return (itemsize * own if TRAITS[config.data_parallel].shards or itemsize != FLOAT32 else 0.0), 0.0
    group = options.reshard_group
    kept = itemsize * load.num_blocks * costs.part_of_block(config.tp) / group if group else 0.0
    # A flattened root, with embedding and head, stays through backward.
    kept += itemsize * (costs.embedding + costs.head) / config.tp if TRAITS[config.data_parallel].flattens else 0.0
    return kept, (UNITS_IN_FLIGHT + max(0, options.prefetch - 1)) * itemsize * unit


def _activations(
    costs: ModelCosts, candidate: Candidate, load: StageLoad, num_tokens: int, itemsize: int
) -> tuple[float, float, float]:
    """Bytes that blocks keep for backward, that the block which runs holds beside them, and of one residual stream."""
    tp = candidate.config.tp
    splits_stream = tp > 1 and candidate.config.sequence_parallel
    block_kept, block_whole = (
        num_tokens * kept_bytes(costs, each, itemsize, tp, splits_stream) for each in (candidate.recompute, KEEP_ALL)
    )
    kept = load.num_blocks * load.in_flight * block_kept
    stream = num_tokens * costs.width * itemsize
    # The gradients of what is as wide as the feed-forward layer are the largest that exist at a time.
    return kept, block_whole - block_kept + 3 * itemsize * num_tokens * costs.wide / tp + 2 * stream, stream


def _logit_bytes(
    costs: ModelCosts, num_tokens: int, tp: int, loss_parallel: bool, itemsize: int, logits: Logits
) -> float:
    part = costs.vocab_size / tp
    if logits == "eager":
        return num_tokens * part * (EAGER_BYTES if tp == 1 else EAGER_BYTES_OF_PARTS)
    # Logits in the compute dtype, in float32 and their gradient; gathered ones are whole in float32.
    chunk = min(CHUNK_TOKENS, num_tokens)
    wide = part if loss_parallel else costs.vocab_size
    return chunk * (2 * itemsize * part + FLOAT32 * wide) + itemsize * part * costs.width
