"""Says what torch's optimizers keep for each parameter, and what a step of theirs holds for a moment."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kernels = Literal["fused", "foreach", "loop"]
"""How an optimizer steps: in one kernel that holds nothing of its own, on all parameters of a group at a time, or on
one after the other, both in elementary operators."""

NUMBER_BYTES = 4
"""Counts of steps and other single numbers are float32."""


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """What an optimizer of torch holds.

    Attributes:
        tensors: Tensors of a parameter's shape and dtype that it keeps.
        numbers: Single numbers that it keeps for a parameter, each a tensor.
        own: Temporaries of a parameter's size while it takes that one.
        before: Temporaries of the last parameter that are still there then.
        at_once: Temporaries of the size of a whole group where it takes all at a time.
        decay: One by one and at a time: more of them where weight decay is added to gradients.
        has_fused: Whether torch has a fused kernel.
    """

    tensors: int
    numbers: int
    own: int
    before: int
    at_once: int
    decay: tuple[int, int]
    has_fused: bool


OPTIMIZERS: Mapping[str, OptimizerMemory] = {
    name: OptimizerMemory(
        tensors=tensors, numbers=numbers, own=own, before=before, at_once=at_once, decay=decay, has_fused=has_fused
    )
    for name, tensors, numbers, own, before, at_once, decay, has_fused in (
        ("adamw", 2, 1, 2, 1, 1, (0, 0), True),
        ("adam", 2, 1, 2, 1, 1, (1, 0), True),
        ("sgd", 0, 0, 0, 0, 0, (1, 1), True),
        ("sgd_momentum", 1, 0, 0, 0, 0, (1, 1), True),
        ("adagrad", 1, 1, 1, 1, 2, (1, 0), True),
        ("rmsprop", 1, 1, 1, 1, 1, (1, 1), False),
        ("adadelta", 2, 1, 2, 1, 2, (1, 1), False),
        ("adamax", 2, 1, 1, 0, 1, (1, 0), False),
        ("nadam", 2, 2, 2, 1, 1, (1, 1), False),
    )
}
"""Optimizers that treat each element by itself, as every layout asks, by name."""


def optimizer_memory(name: str) -> OptimizerMemory:
    """What an optimizer holds.

    Args:
        name: One of `OPTIMIZERS`.

    Raises:
        ValueError: If there is no such name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(
            f"the ledger does not know optimizer {name!r}; legal: {', '.join(OPTIMIZERS)}. Of others it would guess: "
            "Adafactor, Muon and LBFGS look at whole matrices, of which a rank holds a part"
        )
    return OPTIMIZERS[name]


def kernels_of(name: str, asked: Kernels | None) -> Kernels:
    """How an optimizer steps on a CPU.

    Args:
        name: One of `OPTIMIZERS`.
        asked: What is wanted. None: fused where torch has that, else one by one.

    Raises:
        ValueError: If torch has no such kernels.
    """
    has_fused = optimizer_memory(name).has_fused
    if asked == "fused" and not has_fused:
        raise ValueError(f"torch has no fused {name}; use foreach or loop")
    return asked or ("fused" if has_fused else "loop")


def step_temporaries(name: str, kernels: Kernels, *, decays: bool, sizes: Iterable[tuple[int, bool]]) -> int:
    """Most bytes that a step holds beside parameters, gradients and state.

    Args:
        name: One of `OPTIMIZERS`.
        kernels: How it steps.
        decays: Whether there is weight decay, which spares all but matrices.
        sizes: Bytes of what the rank updates of each parameter, and whether that is a matrix, in order.
    """
    memory, most, before = optimizer_memory(name), 0, 0
    if kernels == "fused":
        return 0
    if kernels == "foreach":
        groups = {True: 0, False: 0}
        for size, is_matrix in sizes:
            groups[is_matrix] += size
        return max(size * (memory.at_once + memory.decay[1] * (decays and each)) for each, size in groups.items())
    for size, is_matrix in sizes:
        most = max(most, before * memory.before + size * (memory.own + memory.decay[0] * (decays and is_matrix)))
        before = size
    return most
