"""Makes all ranks leave an action that can fail the same way, with the same result or the same error."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
import xxhash

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What one rank tells the others of its error; exceptions themselves do not always travel."""

    kind: type[OSError] | type[ValueError] | type[RuntimeError]
    message: str
    errno: int | None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describes an exception."""
        if isinstance(error, OSError):
            return cls(OSError, str(error), error.errno)
        if isinstance(error, ValueError):
            return cls(ValueError, str(error), None)
        return cls(RuntimeError, f"{type(error).__name__}: {error}", None)


class Ranks:
    """The ranks that save or load together: all those of the default process group, or one process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Looks whether there is a process group.

        Args:
            group: All ranks of the job, for what they tell each other; a thread beside the training needs one of its
                own. None takes the default one.
        """
        self.group = group
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.size = dist.get_world_size() if self.is_distributed else 1

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank does what only one may do."""
        return self.rank == 0

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Runs an action on every rank and goes on only if it succeeded on all.

        Args:
            what: The action in words that follow "could not", for the message.
            action: Communicates with no other rank.

        Returns:
            This rank's result.

        Raises:
            OSError: If the first rank that failed met an error of the file system.
            ValueError: If it met bad input.
            RuntimeError: If it met anything else.
        """
        return self.alike(what, action, lambda result: "")[0]

    def alike(self, what: str, action: Callable[[], T], digest: Callable[[T], str]) -> tuple[T, bool]:
        """The same, which also tells whether the ranks' results are alike, for the price of one question.

        Args:
            what: As in `together`.
            action: As in `together`.
            digest: Hashes a result.

        Returns:
            This rank's result; whether all ranks' have one hash.

        Raises:
            OSError: As `together`.
            ValueError: As `together`.
            RuntimeError: As `together`.
        """
        failure: Failure | None = None
        cause: Exception | None = None
        text = ""
        try:
            result = action()
            text = digest(result)
        except Exception as error:
            failure, cause = Failure.of(error), error
        numbers = _numbers(text)
        # The highest complement is that of the lowest. What failed where travels only if something did.
        failed, *highest = self._highest(int(failure is not None), *numbers, *(~each for each in numbers))
        if failed:
            self._raise_any(what, self.gather(failure), cause)
        return result, highest == [*numbers, *(~each for each in numbers)]

    def collect(self, what: str, action: Callable[[], T]) -> list[T]:
        """Runs an action on every rank and hands all results to all ranks.

        Args:
            what: As in `together`.
            action: Communicates with no other rank.

        Returns:
            Every rank's result, by rank.

        Raises:
            OSError: As `together`.
            ValueError: As `together`.
            RuntimeError: As `together`.
        """
        outcome: T | Failure
        cause: Exception | None = None
        try:
            outcome = action()
        except Exception as error:
            outcome, cause = Failure.of(error), error
        everyone = self.gather(outcome)
        self._raise_any(what, everyone, cause)
        return cast(list[T], everyone)

    def _raise_any(self, what: str, outcomes: Sequence[object], cause: Exception | None) -> None:
        failures = {rank: each for rank, each in enumerate(outcomes) if isinstance(each, Failure)}
        if failures:
            raise self.error(what, failures) from cause

    def on_coordinator(self, what: str, action: Callable[[], T]) -> T:
        """Runs an action on one rank and hands its result, or its error, to all.

        Args:
            what: The action in words that follow "could not", for the message.
            action: Communicates with no other rank.

        Raises:
            OSError: If it met an error of the file system.
            ValueError: If it met bad input.
            RuntimeError: If it met anything else.
        """
        outcome: list[T | Failure | None] = [None]
        cause: Exception | None = None
        if self.is_coordinator:
            try:
                outcome = [action()]
            except Exception as error:
                outcome, cause = [Failure.of(error)], error
        if self.is_distributed:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result = outcome[0]
        if isinstance(result, Failure):
            raise self.error(what, dict.fromkeys(range(self.size), result)) from cause
        return cast(T, result)

    def require_equal(self, digests: Mapping[str, str]) -> None:
        """Refuses values that every rank must hold alike, because only one rank's are stored.

        Args:
            digests: Name of a value -> its hash.

        Raises:
            ValueError: If the ranks disagree; the message names the values and the ranks.
        """
        mine = dict(digests)
        everyone = self.gather(mine)
        first = everyone[0]
        differing = {
            name: ranks
            for name in dict.fromkeys(name for each in everyone for name in each)
            if (ranks := [rank for rank, each in enumerate(everyone) if each.get(name) != first.get(name)])
        }
        if differing:
            listed = "; ".join(f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in differing.items())
            raise ValueError(
                f"a checkpoint stores one copy of what is not a tensor, but some ranks hold another one than rank 0: "
                f"{listed}; keep them equal on all ranks"
            )

    def broadcast(self, value: T, source: int) -> T:
        """One rank's value on every rank."""
        values: list[T] = [value]
        if self.is_distributed:
            dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    def distinct(self, value: T, digest: str) -> dict[tuple[int, ...], T]:
        """Every distinct value, by the ranks that have it; values travel only where there are several.

        Args:
            value: This rank's.
            digest: Its hash.
        """
        by_digest: dict[str, list[int]] = {}
        for rank, each in enumerate(self.gather(digest)):
            by_digest.setdefault(each, []).append(rank)
        if len(by_digest) == 1:
            return {tuple(range(self.size)): value}
        return {tuple(holders): self.broadcast(value, source=holders[0]) for holders in by_digest.values()}

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return cast(list[T], values)

    def _highest(self, *numbers: int) -> list[int]:
        """The highest of all ranks of each of some numbers; takes a tenth of the time of objects."""
        if self.size == 1:
            return list(numbers)
        # A group takes tensors of some kinds of devices, "cpu:gloo,cuda:nccl" for example.
        on_cpu = "cpu" in dist.get_backend_config(self.group)
        values = torch.tensor(numbers, device="cpu" if on_cpu else torch.cuda.current_device())
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return [int(each) for each in values.tolist()]

    def error(self, what: str, failures: Mapping[int, Failure]) -> Exception:
        """One exception for all ranks.

        Args:
            what: The action that failed, in words that follow "could not".
            failures: Rank -> what it met.
        """
        by_message: dict[str, list[int]] = {}
        for rank, failure in sorted(failures.items()):
            by_message.setdefault(failure.message, []).append(rank)
        first = failures[min(failures)]
        if len(failures) == self.size and len(by_message) == 1:
            details = first.message
        else:
            details = "; ".join(f"rank {', '.join(map(str, on))}: {text}" for text, on in by_message.items())
        # Bad input speaks for itself; other errors do not say what they got in the way of.
        exception = first.kind(details if first.kind is ValueError else f"could not {what}: {details}")
        if isinstance(exception, OSError):
            exception.errno = first.errno
        return exception


def _numbers(text: str) -> list[int]:
    """Four numbers that tell a text from others."""
    words = xxhash.xxh3_128(text.encode()).digest()
    return [int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4)]
