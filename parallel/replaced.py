"""Makes an optimizer say so where it holds parameters that a model no longer has."""

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_MARK = "replaced_in_model"


@contextmanager
def mark_replaced(model: nn.Module) -> Iterator[None]:
    """Marks the parameters that the enclosed code replaces in a model.

    Sharding and `to_empty` make parameters anew. An optimizer that was built before holds the old ones, which never
    get a gradient again, and its step would change nothing without an error; stepping it then raises a ValueError.

    Args:
        model: The model.
    """
    on_meta = {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.is_meta}
    # Weak, so that values which nobody else holds are freed while the model is split; `to_empty`, which is for
    # parameters on meta, cannot swap what has weak references.
    real = {fqn: weakref.ref(parameter) for fqn, parameter in model.named_parameters() if fqn not in on_meta}
    yield
    kept = {id(parameter) for parameter in model.parameters()}
    before = on_meta | {fqn: reference() for fqn, reference in real.items()}
    for fqn, parameter in before.items():
        if parameter is not None and id(parameter) not in kept:
            setattr(parameter, _MARK, fqn)
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    replaced = [getattr(parameter, _MARK) for parameter in held if hasattr(parameter, _MARK)]
    if replaced:
        raise ValueError(
            f"the optimizer holds {len(replaced)} parameters that parallelize or materialize has replaced since "
            f"({', '.join(replaced[:3])} ...), so its step would change nothing; build it after materialize, through "
            "trained.build_optimizer"
        )
