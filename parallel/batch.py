"""The micro-batch that data gives, the step counts and a model reads."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position whose prediction does not enter the loss."""

# B batch, S sequence


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of one data-parallel rank; ranks that split tensors or sequences between them hold the same one.

    Attributes:
        tokens: Token ids, int64 [B, S].
        labels: The token that follows each position, int64 [B, S]; `IGNORE_INDEX` where none is to be predicted.
        positions: Position of each token within its document, int64 [B, S].
        document_ids: Number of the document that each token belongs to, int64 [B, S]; attention does not
            cross documents. None: each row is one document.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    document_ids: Tensor | None = None

    def __post_init__(self) -> None:
        """Checks shapes and types.

        Raises:
            ValueError: If a field is not an int64 matrix of the shape of `tokens`.
        """
        for name in ("tokens", "labels", "positions", "document_ids"):
            value = getattr(self, name)
            if value is None and name == "document_ids":
                continue
            if not isinstance(value, Tensor):
                raise ValueError(f"a batch's {name} must be a tensor, got {type(value).__name__}")
            if value.dim() != 2 or value.shape != self.tokens.shape or value.dtype != torch.int64:
                raise ValueError(
                    f"a batch's {name} must be int64 [batch, sequence] like its tokens, which are "
                    f"{list(self.tokens.shape)}; got {value.dtype} {list(value.shape)}"
                )

    @classmethod
    def from_tokens(cls, tokens: Tensor, labels: Tensor) -> Self:
        """A batch whose rows are one document each.

        Args:
            tokens: Token ids, int64 [B, S].
            labels: The token that follows each position, int64 [B, S].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(tokens=tokens, labels=labels, positions=positions)

    @property
    def num_valid_tokens(self) -> Tensor:
        """Number of positions that enter the loss, an int64 scalar on the batch's device."""
        return (self.labels != IGNORE_INDEX).sum()

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        return Batch(
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            document_ids=None if self.document_ids is None else self.document_ids.to(device, non_blocking=True),
        )
