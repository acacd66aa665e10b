"""Tests of the rotary position embedding."""

import math

import pytest
import torch

from models.layers.rotary import RotaryScaling, apply_rotary, rotary_frequencies, rotary_tables

CPU = torch.device("cpu")


def test_rotation_equals_multiplication_of_complex_pairs_and_so_does_its_gradient() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.randint(0, 1000, (2, 5))
    frequencies = rotary_frequencies(8, 100.0, None, CPU, torch.float64)
    turned = apply_rotary(x, rotary_tables(positions, frequencies))
    first, second = x.chunk(2, dim=-1)
    angles = (positions[..., None] * frequencies)[:, :, None]
    product = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((product.real, product.imag), dim=-1)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-14)
    gradients = [torch.autograd.grad((each * weights).sum(), x)[0] for each in (turned, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    frequencies = rotary_frequencies(16, 10_000.0, None, CPU, torch.float64)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned_q = apply_rotary(q, rotary_tables(torch.tensor([[at_q]]), frequencies))
        turned_k = apply_rotary(k, rotary_tables(torch.tensor([[at_k]]), frequencies))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(7, 3), score(1007, 1003), rtol=0, atol=1e-12)


def test_bfloat16_heads_are_turned_in_float32() -> None:
    x = torch.randn(1, 4, 2, 8).bfloat16()
    rotary = rotary_tables(torch.arange(4)[None] + 5000, rotary_frequencies(8, 10_000.0, None, CPU, torch.float32))
    turned = apply_rotary(x, rotary)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rotary(x.float(), rotary).bfloat16())


def test_llama3_scaling_divides_slow_frequencies_and_keeps_fast_ones() -> None:
    scaling = RotaryScaling(factor=8.0)
    plain = rotary_frequencies(128, 500_000.0, None, CPU, torch.float64)
    scaled = rotary_frequencies(128, 500_000.0, scaling, CPU, torch.float64)
    waves = 2 * math.pi / plain
    fast, slow = waves < 8192 / 4, waves > 8192
    assert torch.equal(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8, rtol=1e-15, atol=0)
    between = (plain / scaled)[~fast & ~slow]
    assert len(between) and bool(((between > 1) & (between < 8)).all())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0.5}, "factor=0.5"),
        ({"low_frequency_factor": 4.0}, "low_frequency_factor=4.0"),
        ({"original_sequence_length": 0}, "original_sequence_length=0"),
    ],
)
def test_scaling_out_of_range_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryScaling(**fields)  # type: ignore[arg-type]
