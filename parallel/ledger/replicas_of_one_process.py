"""Predicts what the GPUs of one process hold and send each other, where one of them keeps the training state."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from parallel.ledger.block_sizes import BatchShape
from parallel.ledger.ends_memory import INT64
from parallel.ledger.parts import ModelParts
from parallel.ledger.wire import central_gather_bytes
from parallel.traits import TRAITS

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class ReplicaForecast:
    """What `DataParallel` makes of a step on several GPUs; the first one's states are those of one process.

    Attributes:
        num_devices: GPUs that get rows of a micro-batch.
        parameters: Bytes of the copy that each other GPU holds from forward to the end of backward.
        gradients: Bytes of the gradients of that copy, there until all are, then added up on the first GPU.
        sent_bytes: What crosses links between the first GPU and others in a step, both directions, by what it is for.
    """

    num_devices: int
    parameters: int
    gradients: int
    sent_bytes: Mapping[str, int]


def predict_replicas(parts: ModelParts, batch: BatchShape, num_devices: int) -> ReplicaForecast | None:
    """What the GPUs but the first hold of parameters, and what a step sends; None where there are none.

    Each micro-batch copies all parameters to each other GPU, in the dtype in which they are stored, and brings as many
    gradients back: of those that are not trained, zeros. Activations are not in it.

    Args:
        parts: The model in its layout.
        batch: What the process is given.
        num_devices: GPUs of the process.
    """
    if num_devices < 2 or not TRAITS[parts.config.data_parallel].gathers_centrally:
        return None
    # Rows are cut as `torch.chunk` does, so that some GPUs may get none.
    rows = -(-batch.micro_batch // num_devices)
    used = -(-batch.micro_batch // rows)
    held = sum(prod(each.shape) * each.dtype.itemsize for each in parts.parameters)
    made = held if any(each.trainable for each in parts.parameters) else 0
    away = (batch.micro_batch - rows) * batch.sequence_length * INT64 * (3 + batch.has_documents)
    count = batch.num_micro_batches
    return ReplicaForecast(
        num_devices=used,
        parameters=held,
        gradients=made,
        sent_bytes={
            "parameters to others": count * central_gather_bytes(held, used) // 2,
            "tokens to others": count * away,
            "losses and their gradients": count * central_gather_bytes(FLOAT32, used),
            "gradients to the first": count * central_gather_bytes(made, used) // 2,
        },
    )
