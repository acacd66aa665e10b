"""Which samples each step trains on: one global order, of which every rank takes its share."""

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from parallel.batch import Batch
from recipes.checks import check_integer
from recipes.data.collate import collate
from recipes.data.mixture import Dataset

_IDENTITY = ("seed", "sequence_length", "num_samples", "fingerprint")


class DataStream:
    """The samples of a dataset in an order that depends on (seed, epoch) alone, step by step, for ever.

    A step takes the next `global_batch` samples of the epoch's order, whatever the mesh; data-parallel rank r of n
    takes every n-th of them from the r-th on. Each sample comes exactly once an epoch, or in a mixture as its weights
    say (see `recipes.data.mixture`): the last step of an epoch is shorter where `global_batch` does not divide its
    samples, never dropped and never filled from the next epoch.
    Every step gives every rank the same number of micro-batches of the same shape; rows that hold no sample are
    padding, which does not enter the loss.

    Attributes:
        epoch: Number of the epoch that the next step belongs to, from 0.
        position: Samples of that epoch that all ranks together have consumed.
        last_sample_ids: The samples that this rank got in the latest step.
    """

    def __init__(
        self, dataset: Dataset, *, global_batch: int, micro_batch: int, dp_rank: int, dp_degree: int, seed: int
    ) -> None:
        """Starts before the first sample of epoch 0.

        Args:
            dataset: The samples.
            global_batch: Samples of one optimizer step, over all ranks.
            micro_batch: Rows of one micro-batch on one rank.
            dp_rank: Coordinate of this rank on the `dp` view; ranks that split one sample share it.
            dp_degree: Size of that view.
            seed: Seed of the order.

        Raises:
            ValueError: If a number is out of its range.
        """
        check_integer("global_batch", global_batch, minimum=1)
        check_integer("seed", seed, minimum=0)
        _check_share(micro_batch, dp_rank, dp_degree)
        self._dataset, self._seed = dataset, seed
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self.epoch = 0
        self.position = 0
        self.last_sample_ids: list[int] = []
        self._order = dataset.order(seed, 0)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on one rank."""
        return -(-self._global_batch // (self._dp_degree * self._micro_batch))

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch, the shorter last one included."""
        return -(-self._dataset.num_samples // self._global_batch)

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step."""
        sample_ids = self._order[self.position : self.position + self._global_batch]
        self.last_sample_ids = sample_ids[self._dp_rank :: self._dp_degree].tolist()
        self._move_to(self.epoch, self.position + len(sample_ids))
        return [*_MicroBatches(self._dataset, self.last_sample_ids, self._micro_batch, self.num_micro_batches)]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands and of which data, as JSON can hold it; the same on every rank of every mesh."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "sequence_length": self._dataset.sequence_length,
            "num_samples": self._dataset.num_samples,
            "fingerprint": self._dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes where another stream stood; batch sizes and the data-parallel degree may differ from its own.

        Args:
            state: What `state_dict` gave.

        Raises:
            ValueError: If the state is of other data, or of the same data in another order.
        """
        own = self.state_dict()
        missing = sorted(own.keys() - state.keys())
        if missing:
            raise ValueError(f"the saved data position lacks {', '.join(missing)}")
        differences = [f"{name} {state[name]!r} -> {own[name]!r}" for name in _IDENTITY if state[name] != own[name]]
        if differences:
            raise ValueError(
                f"cannot resume at the saved data position, the data differ (saved -> now): {'; '.join(differences)}; "
                "use the same text, tokenizer, mixture, sequence_length and seed, or start a new run"
            )
        check_integer("saved epoch", state["epoch"], minimum=0)
        check_integer("saved position", state["position"], minimum=0)
        if state["position"] >= self._dataset.num_samples:
            raise ValueError(
                f"the saved position {state['position']} is beyond the {self._dataset.num_samples} samples of an epoch"
            )
        self._move_to(state["epoch"], state["position"])

    def _move_to(self, epoch: int, position: int) -> None:
        if position == self._dataset.num_samples:
            epoch, position = epoch + 1, 0
        if epoch != self.epoch:
            self._order = self._dataset.order(self._seed, epoch)
        self.epoch, self.position = epoch, position


def evaluation_batches(
    dataset: Dataset, *, micro_batch: int, dp_rank: int, dp_degree: int, max_samples: int | None = None
) -> Sequence[Batch]:
    """This rank's share of a dataset for one evaluation, as many micro-batches on every rank, made when asked for.

    Args:
        dataset: What is evaluated on.
        micro_batch: Rows of one micro-batch; those left over are padding.
        dp_rank: Coordinate of this rank on the `dp` view.
        dp_degree: Size of that view.
        max_samples: Take no more than these, evenly spread over the dataset and the same on every mesh; None: all.

    Raises:
        ValueError: If a number is out of its range.
    """
    _check_share(micro_batch, dp_rank, dp_degree)
    num_samples = dataset.num_samples
    if max_samples is not None:
        check_integer("max_samples", max_samples, minimum=1)
        num_samples = min(num_samples, max_samples)
    sample_ids = np.arange(num_samples) * dataset.num_samples // num_samples
    num_micro_batches = -(-num_samples // (dp_degree * micro_batch))
    return _MicroBatches(dataset, sample_ids[dp_rank::dp_degree].tolist(), micro_batch, num_micro_batches)


class _MicroBatches(Sequence[Batch]):
    """Samples as micro-batches, the last ones filled up with padding."""

    def __init__(self, dataset: Dataset, sample_ids: list[int], micro_batch: int, num: int) -> None:
        self._dataset, self._sample_ids, self._micro_batch, self._num = dataset, sample_ids, micro_batch, num

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._num))]
        start = range(self._num)[index] * self._micro_batch
        return collate(self._dataset, self._sample_ids[start : start + self._micro_batch], self._micro_batch)


def _check_share(micro_batch: int, dp_rank: int, dp_degree: int) -> None:
    check_integer("micro_batch", micro_batch, minimum=1)
    check_integer("dp_degree", dp_degree, minimum=1)
    check_integer("dp_rank", dp_rank, minimum=0)
    if dp_rank >= dp_degree:
        raise ValueError(f"dp_rank={dp_rank} must be less than dp_degree={dp_degree}")
