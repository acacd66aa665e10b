"""Rotary position embedding in the half-split convention, computed from positions and kept nowhere.

Source: Su et al. 2021, "RoFormer"; frequency scaling as in Llama 3.1 (Grattafiori et al. 2024, "The Llama 3 Herd of
Models").
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# B batch, S sequence, H heads, K head_dim, F frequencies (K / 2)

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of every position's angles, both [B, S, F]."""


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Llama 3's stretch of slow frequencies, which lengthens the context that a model was pretrained with.

    Attributes:
        factor: By how much frequencies with long waves are divided.
        low_frequency_factor: Waves longer than `original_sequence_length` / this are divided by `factor`.
        high_frequency_factor: Waves shorter than `original_sequence_length` / this stay as they are; between the
            two the divisor changes smoothly.
        original_sequence_length: Tokens of a sequence in pretraining.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_sequence_length: int = 8192

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a factor is below 1, the two bounds are not in order, or the length is not positive.
        """
        if self.factor < 1:
            raise ValueError(f"factor={self.factor} must be at least 1; leave the scaling out to scale nothing")
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor={self.low_frequency_factor} must be positive and below "
                f"high_frequency_factor={self.high_frequency_factor}"
            )
        if self.original_sequence_length < 1:
            raise ValueError(f"original_sequence_length={self.original_sequence_length} must be at least 1")


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RotaryScaling | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Radians that each pair of components turns per position.

    Args:
        head_dim: Components of a head, an even number.
        theta: Base of the geometric series of wave lengths.
        scaling: Stretch of slow frequencies.
        device: Where the angles will be needed.
        dtype: float32 or float64.

    Returns:
        Frequencies, [head_dim / 2].
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    waves = scaling.original_sequence_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotary_tables(positions_BS: Tensor, frequencies_F: Tensor) -> Rotary:
    """Cosines and sines of the angles by which each position is turned.

    Args:
        positions_BS: Position of each token within its document, int64 [B, S].
        frequencies_F: As `rotary_frequencies` gives them.

    Returns:
        Cosines and sines, [B, S, F] in the dtype of the frequencies.
    """
    angles_BSF = positions_BS.unsqueeze(-1) * frequencies_F
    return angles_BSF.cos(), angles_BSF.sin()


def apply_rotary(x_BSHK: Tensor, rotary: Rotary) -> Tensor:
    """Turns every head by the angle of its position.

    Args:
        x_BSHK: Queries or keys, [B, S, H, K].
        rotary: Cosines and sines, [B, S, K / 2]; the turn is computed in their dtype.

    Returns:
        Turned heads, [B, S, H, K] in the dtype of `x_BSHK`.
    """
    return _Turn.apply(x_BSHK, *rotary)


class _Turn(torch.autograd.Function):
    """A rotation, whose gradient is the rotation back.

    Written out because autograd's version of it takes twice the time and keeps four temporaries a call.
    """

    @staticmethod
    def forward(ctx: Any, x_BSHK: Tensor, cos_BSF: Tensor, sin_BSF: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BSF, sin_BSF)
        return _turn(x_BSHK, cos_BSF, sin_BSF, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_BSHK: Tensor) -> tuple[Tensor, None, None]:
        cos_BSF, sin_BSF = ctx.saved_tensors
        return _turn(grad_BSHK, cos_BSF, sin_BSF, -1.0), None, None


def _turn(x_BSHK: Tensor, cos_BSF: Tensor, sin_BSF: Tensor, sign: float) -> Tensor:
    # 2: the two halves of a head; component f of the first makes a pair with component f of the second
    x_BSH2F = x_BSHK.to(cos_BSF.dtype).unflatten(-1, (2, -1))
    turned_BSH2F = x_BSH2F * cos_BSF[:, :, None, None, :]
    sin_BS1F = sin_BSF.unsqueeze(2)
    turned_BSH2F[..., 0, :].addcmul_(x_BSH2F[..., 1, :], sin_BS1F, value=-sign)
    turned_BSH2F[..., 1, :].addcmul_(x_BSH2F[..., 0, :], sin_BS1F, value=sign)
    return turned_BSH2F.flatten(-2).to(x_BSHK.dtype)
