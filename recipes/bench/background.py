"""Measures what a save in the background costs training, beside a plain copy and beside torch's own."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from checkpoint import BackgroundSaver
from parallel import Batch, Trained
from recipes.bench.checkpoint import SavedState
from recipes.bench.rounds import Comparison, interleave

STALL_AIM = 1.2
LOST_AIM = 0.6
SEQUENCE_LENGTH = 128
NO_SAVE, TORCH, OURS = "no save", "torch's async_save", "ours"


class BackgroundSaves(SavedState):
    """That state with training on it, and saves beside it."""

    def __init__(self, folder: str) -> None:
        """Takes the memory that saves use again and again."""
        super().__init__(folder)
        self.saver = BackgroundSaver(self.folder / "ours")
        # Other than torch's own default, which is the one of training.
        self.group = dist.new_group(backend="gloo")
        self.copies = [torch.empty_like(each) for each in self.local]
        tokens = torch.randint(0, 8192, (1, SEQUENCE_LENGTH + 1))
        self.batches = [Batch.from_tokens(tokens[:, :-1], labels=tokens[:, 1:])]

    def prepare(self) -> None:
        """Waits for what is under way, and clears the folder."""
        self.saver.finish()
        self.clear()

    def copy(self) -> None:
        """A plain copy of all that this rank holds."""
        for copy, values in zip(self.copies, self.local, strict=True):
            copy.copy_(values)

    def start(self) -> None:
        """What training waits for."""
        self.saver.save(self.state)

    def train(self, num_steps: int) -> None:
        """Steps of training, the optimizer's among them."""
        trained, optimizer = cast(Trained, self.state.trained), cast(torch.optim.Optimizer, self.state.optimizer)
        for _ in range(num_steps):
            trained.forward_backward(self.batches)
            optimizer.step()

    def train_beside_ours(self, num_steps: int) -> None:
        """The same while we save; waits for the end of the save."""
        self.saver.save(self.state)
        self.train(num_steps)
        self.saver.finish()

    def train_beside_torch(self, num_steps: int) -> None:
        """The same while torch saves."""
        writer = FileSystemWriter(self.folder / "torch")
        saved = dcp.async_save(dict(self.tensors), storage_writer=writer, process_group=self.group)
        self.train(num_steps)
        saved.result()  # type: ignore[union-attr]  # a future, since no other kind of saver is asked for


def compare_stall(num_rounds: int, folder: str) -> Comparison:
    """How long training stands still for a save in the background; the memory for it is there by then.

    Args:
        num_rounds: Rounds.
        folder: Where to write; 2 GB must be free.
    """
    bench = BackgroundSaves(folder)
    contenders = {"plain copy": bench.copy, OURS: bench.start}
    times_s = interleave(contenders, num_rounds=num_rounds, steps_of_a_round=1, prepare=bench.prepare)
    bench.prepare()
    return Comparison(title=f"stall, {bench.describe()}", times_s=times_s, targets={OURS: STALL_AIM})


def compare_training(num_rounds: int, folder: str, num_steps: int = 8) -> Comparison:
    """Steps of training with a save beside them.

    Args:
        num_rounds: Rounds.
        folder: Where to write; 2 GB must be free.
        num_steps: Steps, which should take longer than a save.
    """
    bench = BackgroundSaves(folder)
    ways = {NO_SAVE: bench.train, TORCH: bench.train_beside_torch, OURS: bench.train_beside_ours}
    contenders: dict[str, Callable[[], object]] = {name: partial(way, num_steps) for name, way in ways.items()}
    times_s = interleave(contenders, num_rounds=num_rounds, steps_of_a_round=1, prepare=bench.prepare)
    return Comparison(title=f"{num_steps} steps beside a save, {bench.describe()}", times_s=times_s, targets={})


def lost_share(comparison: Comparison) -> float:
    """Time that training loses to our save as a share of what it loses to torch's; `LOST_AIM` is aimed at.

    Args:
        comparison: From `compare_training`.
    """
    alone_s = comparison.times_s[NO_SAVE]

    def lost_s(name: str) -> float:
        times_s = comparison.times_s[name]
        return statistics.median(with_save - alone for with_save, alone in zip(times_s, alone_s, strict=True))

    return lost_s(OURS) / lost_s(TORCH)
