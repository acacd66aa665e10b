"""Memory that is told what would be allocated, piece by piece, and freed when nothing holds the piece any more."""


class Memory:
    """Counts pieces as an allocator would, without any memory.

    Attributes:
        now: Bytes of all pieces that something holds.
        peak: Most of that so far.
    """

    __slots__ = ("now", "peak")

    def __init__(self) -> None:
        """Empty."""
        self.now = self.peak = 0

    def new(self, num_bytes: int) -> "Piece":
        """A piece, counted until the last reference to it is gone.

        Args:
            num_bytes: Its size.
        """
        return Piece(self, num_bytes)

    def change(self, num_bytes: int, above: int = 0) -> None:
        """Lets a stretch pass by: something is held or freed in the end.

        Args:
            num_bytes: What is held after it more than before.
            above: Most that was held within it beyond what was held before.
        """
        most = self.now + max(above, num_bytes)
        if most > self.peak:
            self.peak = most
        self.now += num_bytes


class Piece:
    """One tensor's memory."""

    __slots__ = ("memory", "num_bytes")

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        """Counts it.

        Args:
            memory: Where.
            num_bytes: Its size.
        """
        self.memory, self.num_bytes = memory, num_bytes
        memory.now += num_bytes
        if memory.now > memory.peak:
            memory.peak = memory.now

    def __del__(self) -> None:
        self.memory.now -= self.num_bytes


Saved = dict[str, Piece]
"""What a forward keeps for its backward, by name."""
