"""Draws the next token of a text, on any mesh."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from models.layers.kv_cache import kv_cache
from parallel import Trained

NextLogits = Callable[[list[int]], Tensor]
"""Logits [V] of the token after all tokens so far, which only grow from call to call."""

_BROKEN = -1


@contextmanager
def next_logits(trained: Trained, context: int, num_tokens: int, *, cache: bool) -> Iterator[NextLogits]:
    """Gives a function from tokens to the logits of the next one; every rank calls it together.

    The model sees no more than the length that it was trained on. Where the tokens outgrow it, it goes on with the
    latest half, so that a cache has to be filled anew only once in half a length.

    Args:
        trained: The model.
        context: Most tokens that it sees.
        num_tokens: Tokens that there will be at most.
        cache: Keep keys and values from call to call.
    """

    def window(length: int) -> int:
        """Where what the model sees begins."""
        half = max(1, context // 2)
        return 0 if length <= context else -(-(length - context) // half) * half

    def uncached(tokens: list[int]) -> Tensor:
        return _last_logits(trained, tokens[window(len(tokens)) :], 0)

    if not cache:
        yield uncached
        return
    with kv_cache(trained.source, min(context, num_tokens)) as kept:
        begin = 0

        def cached(tokens: list[int]) -> Tensor:
            nonlocal begin
            if window(len(tokens)) != begin:
                begin = window(len(tokens))
                kept.clear()
            return _last_logits(trained, tokens[begin + kept.length :], kept.length)

        yield cached


def _last_logits(trained: Trained, tokens: list[int], position: int) -> Tensor:
    """Logits [V] after the last of some tokens, the first of which has the given position."""
    row = torch.tensor([tokens], device=trained.mesh.device)
    positions = torch.arange(position, position + len(tokens), device=trained.mesh.device).unsqueeze(0)
    return trained.logits(row, positions=positions)[0, -1]


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draws a token.

    Args:
        logits: Logits of the vocabulary, [V], on the CPU.
        temperature: Divides them; 0 takes the largest.
        top_p: Draw among the likeliest only that together have this probability; 1: among all.
        generator: Source of the draw.

    Source of top_p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    if temperature == 0:
        return int(logits.argmax())
    # Less the largest, so that no temperature is too small.
    probabilities = torch.softmax((logits - logits.max()).double() / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # The token that reaches top_p is still among them, and so is the first.
        enough = ordered.cumsum(0) - ordered >= top_p
        probabilities[order[enough]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator)[0])


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draws a token, the same on every rank; every rank of the job calls this.

    Args:
        logits: This rank's logits, [V]: equal on all ranks up to rounding, which could tip a draw.
        temperature: See `sample`.
        top_p: See `sample`.
        generator: Source of the draw; that of rank 0 counts.

    Raises:
        ValueError: On every rank, if a logit is NaN or infinite; some may be minus infinity, but not all.
    """
    # NaN is the largest of all.
    token = _BROKEN if not logits.max().isfinite() else sample(logits.cpu(), temperature, top_p, generator)
    drawn = torch.tensor(token, device=logits.device)
    dist.broadcast(drawn, src=0)
    if drawn == _BROKEN:
        raise ValueError(
            "the model's logits are NaN or infinite, so there is no token to draw: its training has diverged, or its "
            "weights are broken; take an earlier checkpoint"
        )
    return int(drawn)
