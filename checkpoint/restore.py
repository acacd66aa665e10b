"""Fills a training state from a checkpoint that fits it."""

import torch
from torch import Tensor

from checkpoint import optimizer_state, random_state
from checkpoint.fit import Fit
from checkpoint.placed import LocalBoxes
from checkpoint.ranks import Ranks
from checkpoint.reader import Slice
from checkpoint.undo import Undo
from parallel.replicas import local_parts


class Restore:
    """One load of one checkpoint into one training state: `slices`, `begin`, `finish`, in this order."""

    def __init__(self, fit: Fit, ranks: Ranks) -> None:
        """Changes nothing yet.

        Args:
            fit: The two, once `check` has found what does not fit.
            ranks: Ranks of this load.
        """
        self.fit, self.ranks = fit, ranks
        self.new_entries: dict[str, Tensor] = {}
        self.targets = fit.canonical({})
        self.generators: dict[str, Tensor] = {}
        self.undo_all: Undo | None = None
        self.attempted: list[str] = []

    def slices(self) -> list[Slice]:
        """The parts of stored tensors that this rank needs, with the memory of the state that takes them."""
        fit = self.fit
        self.new_entries = self._new_entries()
        self.targets = fit.canonical(fit.held() | self.new_entries)
        self.generators = {
            name: torch.empty(like.shape[1:], dtype=like.dtype)
            for name, like in fit.generators().items()
            if name not in fit.unfit
        }
        row = random_state.source_rank(self.ranks.rank, self.ranks.size, fit.manifest.header.world_size)
        boxes, parts = LocalBoxes(), local_parts(self.targets.values())
        return [
            *(
                Slice(fit.selection.stored_name(name), boxes.of(tensor).offsets, part)
                for (name, tensor), part in zip(self.targets.items(), parts, strict=True)
            ),
            *(Slice(name, (row, 0), state.unsqueeze(0)) for name, state in self.generators.items()),
        ]

    def begin(self) -> None:
        """Takes over what may still refuse, and can be put back, before any tensor is filled.

        Raises:
            ValueError: If something stateful cannot take its saved state.
        """
        fit, header = self.fit, self.fit.manifest.header
        self.undo_all = Undo(fit.state)
        if fit.optimizer is not None and header.optimizer is not None:
            # Ahead of a learning-rate scheduler, which may set another rate.
            optimizer_state.set_hyperparameters(fit.optimizer, header.optimizer["groups"])
        if "progress" in fit.parts:
            for name, each in fit.state.stateful.items():
                if name not in header.stateful:
                    continue
                self.attempted.append(name)
                try:
                    each.load_state_dict(header.stateful[name])
                except (TypeError, LookupError, AttributeError) as error:
                    raise ValueError(
                        f"stateful.{name} of the checkpoint is no state of a {type(each).__name__} "
                        f"({type(error).__name__}: {error}); nothing was changed; load it into what saved it"
                    ) from error

    def finish(self) -> None:
        """Takes over the rest, after all tensors are filled; ranks call this together."""
        fit, header = self.fit, self.fit.manifest.header
        self.targets.fill_held()
        if fit.optimizer is not None and header.optimizer is not None:
            optimizer_state.attach(fit.optimizer, fit.parameters, self.new_entries, fit.scalars())
        if "progress" in fit.parts:
            fit.state.step, fit.state.num_tokens = header.step, header.num_tokens
        if self.generators:
            # Last, so that nothing above can draw from them.
            random_state.restore(self.generators, self.ranks.rank, self.ranks.size, header.world_size)

    def undo(self, error: BaseException) -> None:
        """Puts back what `begin` changed on this rank, perhaps because of an error on another one.

        Args:
            error: Why; gets a note of whatever could not be put back.
        """
        if self.undo_all is not None:
            self.undo_all(self.attempted, error)

    def _new_entries(self) -> dict[str, Tensor]:
        """Memory for what the optimizer does not have yet."""
        fit = self.fit
        if fit.optimizer is None:
            return {}
        groups = {id(parameter): group for group in fit.optimizer.param_groups for parameter in group["params"]}
        entries: dict[str, Tensor] = {}
        for name in fit.adopted():
            stored, (fqn, _) = fit.stored[name], optimizer_state.split_name(name)
            parameter = fit.parameters[fqn]
            shape = tuple(parameter.shape) if stored.shape == fit.whole_shape(fqn) else stored.shape
            entries[name] = optimizer_state.new_entry(name, stored.dtype, shape, parameter, groups[id(parameter)])
        return entries
