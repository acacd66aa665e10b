"""Where a run starts from: its own newest checkpoint, the weights of another run, or nothing."""

import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch.optim import Optimizer

from checkpoint import TrainState, latest, load
from checkpoint.ranks import Ranks
from checkpoint.steps import STEP_NAME, step_name
from models.layers.lora import is_of_adapter
from parallel import Trained, materialize
from parallel.materialize import allocate
from recipes.adapters import AdapterBase, adapters_of_state, find_base
from recipes.from_checkpoint import find_checkpoint, in_one_line, load_base, load_weights, refuse_other_model
from recipes.recipe import Recipe, changed_fields


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts from.

    Attributes:
        own: Its own newest checkpoint.
        weights: The checkpoint whose weights it takes, if it has none of its own.
        base: What its adapters are trained on, where its checkpoints hold nothing else; None: they hold all.
    """

    own: Path | None
    weights: str | None
    base: AdapterBase | None = None

    @classmethod
    def find(cls, recipe: Recipe, ranks: Ranks) -> "Start":
        """Looks for checkpoints; every rank calls this together.

        Args:
            recipe: The run's recipe; its folder is made, so that one that cannot be fails the run before its first
                step.
            ranks: Ranks of the job.

        Raises:
            ValueError: If the checkpoint that it names for its weights is none, or its own are all damaged.
            OSError: If its folder cannot be made.
        """

        def newest() -> Path | None:
            folder = recipe.output.checkpoints
            folder.mkdir(parents=True, exist_ok=True)
            found = latest(folder, thorough=False)
            unusable = [] if found else sorted(each.name for each in folder.iterdir() if STEP_NAME.fullmatch(each.name))
            if unusable:
                raise ValueError(
                    f"{folder} holds {', '.join(unusable)}, of which none is complete and undamaged, and a run from "
                    "scratch would replace them; mend or move them, or name another output.folder"
                )
            return found

        def origin(path: str) -> str:
            return ranks.on_coordinator(f"start from {path}", lambda: find_checkpoint(path))

        own = ranks.on_coordinator(f"use {recipe.output.checkpoints}", newest)
        named = recipe.training.init_from
        weights = None if own is not None or named is None else origin(named)
        if not recipe.output.adapters_only:
            return cls(own=own, weights=weights)

        def base() -> AdapterBase:
            elsewhere = (
                find_checkpoint(named) if own is not None and named is not None and os.path.isdir(named) else None
            )
            path = str(own or weights)
            return find_base(path, elsewhere) or AdapterBase.at(path)

        return cls(own=own, weights=weights, base=ranks.on_coordinator("find the base of the adapters", base))

    def initialize(self, trained: Trained, recipe: Recipe) -> None:
        """Gives parameters memory, and initial values where no checkpoint brings any.

        Args:
            trained: The run's model.
            recipe: The run's recipe.
        """
        if self.own is None and self.weights is None:
            materialize(trained, seed=recipe.training.seed)
        elif recipe.lora.rank:
            materialize(trained, seed=recipe.training.seed, draws=is_of_adapter)
        else:
            allocate(trained)

    def load(self, state: TrainState, recipe: Recipe) -> float | None:
        """Fills a state; every rank calls this together.

        Args:
            state: The run's state, as it was built.
            recipe: The run's recipe.

        Returns:
            Seconds that the run's own checkpoint took; None without one.

        Raises:
            ValueError: If the checkpoint does not fit, or cannot be read.
        """
        start_s = time.perf_counter()
        if self.weights is not None:
            load_weights(self.weights, cast(Trained, state.trained), recipe)
        if self.own is None:
            return None
        refuse_other_model(self.own, recipe)
        if self.base is not None:
            load_base(self.base.path, cast(Trained, state.trained), recipe)
        optimizer = cast(Optimizer, state.optimizer)
        wanted = [_hyperparameters(group) for group in optimizer.param_groups]
        filled = state if self.base is None else adapters_of_state(state)
        try:
            # The folder, so that an older checkpoint serves where the newest is damaged.
            load(recipe.output.checkpoints, filled)
        except ValueError as error:
            raise in_one_line(error, self.own, recipe, "; name another output.folder for it") from error
        state.step, state.num_tokens = filled.step, filled.num_tokens
        for group, values in zip(optimizer.param_groups, wanted, strict=True):
            changes = changed_fields(_hyperparameters(group), values, f"{group['name']}.")
            if changes:
                warnings.warn(f"the optimizer changes on resume (saved -> now): {'; '.join(changes)}", stacklevel=2)
            group.update(values)
        return time.perf_counter() - start_s

    def headline(self, state: TrainState, last_step: int) -> str:
        """What a run says of its start.

        Args:
            state: The state after `load`.
            last_step: The step after which it stops.
        """
        if self.own is None:
            return "from scratch" if self.weights is None else f"from the weights of {self.weights}, else from scratch"
        left = "" if state.step < last_step else f"; nothing is left to do until step {last_step}"
        loaded = self.own.with_name(step_name(state.step))
        return f"from {loaded}: step {state.step}, {state.num_tokens:,} tokens seen{left}"


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a recipe says of a group, but for its learning rate, which the schedule sets."""
    return {name: group[name] for name in ("betas", "eps", "weight_decay")}
