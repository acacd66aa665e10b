"""Keeps keys and values of tokens that a model has seen, so that the next one is the only one to compute."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from models.layers.attention import Attention, SdpaCore, attend

# B batch, S new tokens, T tokens so far with the new ones, H query heads, G key-value heads, K head_dim


class KvCache:
    """What the cached cores of all layers share: how many tokens there are, and of which documents.

    Keys and values are kept as this rank computes them: in its compute dtype, without the repetition that serves
    query heads, under tensor parallelism for its own heads only.

    Attributes:
        capacity: Most tokens of a row.
        length: Tokens so far.
    """

    def __init__(self, capacity: int) -> None:
        """Starts empty; memory is taken when the first tokens come.

        Args:
            capacity: Most tokens of a row.

        Raises:
            ValueError: If it is not positive.
        """
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        self.length = 0
        self.cores: list[CachedCore] = []
        self._document_ids: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds for keys and values."""
        return sum(each.nbytes for core in self.cores for each in core.kept)

    def clear(self) -> None:
        """Forgets all tokens and keeps the memory."""
        self.length = 0
        self._document_ids = None

    def extend(self, document_ids: Tensor | None) -> Tensor | None:
        """Takes note of the documents of new tokens.

        Args:
            document_ids: Document of each new token, int64 [B, S]. None: each row is one document.

        Returns:
            The documents of all tokens so far, [B, T].

        Raises:
            ValueError: If they were given for some tokens and not for others.
        """
        if self.length and (document_ids is None) != (self._document_ids is None):
            raise ValueError("document_ids must be given for all tokens in a cache or for none; clear it in between")
        if document_ids is not None and self._document_ids is not None:
            document_ids = torch.cat([self._document_ids[:, : self.length], document_ids], dim=1)
        self._document_ids = document_ids
        return document_ids


class CachedCore(nn.Module):
    """Attention of the queries of new tokens to the keys and values of all tokens so far.

    Attributes:
        kept: Keys and values, [B, capacity, G, K] each; nothing before the first tokens.
    """

    def __init__(self, cache: KvCache) -> None:
        """Starts empty.

        Args:
            cache: What all layers share.
        """
        super().__init__()
        self._cache = cache
        self.kept: tuple[Tensor, ...] = ()

    def prepare(self, document_ids: Tensor | None) -> Tensor | None:
        """What every layer's attention needs to know; the model calls this once for each forward.

        Args:
            document_ids: Document of each new token, int64 [B, S]. None: each row is one document.

        Returns:
            The documents of all tokens so far, [B, T].
        """
        return self._cache.extend(document_ids)

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, inputs: Tensor | None) -> Tensor:
        """Keeps the new keys and values, and attends.

        Args:
            q_BSHK: Queries of the new tokens, [B, S, H, K].
            k_BSGK: Their keys, [B, S, G, K].
            v_BSGK: Their values, [B, S, G, K].
            inputs: What `prepare` returned.

        Returns:
            Weighted values, [B, S, H, K].

        Raises:
            ValueError: If the cache is full, or the rows are not those of the tokens before.
        """
        cache, num_new = self._cache, q_BSHK.shape[1]
        start, stop = cache.length, cache.length + num_new
        if stop > cache.capacity:
            raise ValueError(f"{num_new} more tokens after {start} do not fit a cache of capacity={cache.capacity}")
        if not start and (not self.kept or self.kept[0].shape[0] != k_BSGK.shape[0]):
            shape = (k_BSGK.shape[0], cache.capacity, *k_BSGK.shape[2:])
            self.kept = (k_BSGK.new_empty(shape), v_BSGK.new_empty(shape))
        if self.kept[0].shape[0] != k_BSGK.shape[0]:
            raise ValueError(f"the cache holds {self.kept[0].shape[0]} rows, {k_BSGK.shape[0]} came")
        for kept, new in zip(self.kept, (k_BSGK, v_BSGK), strict=True):
            kept[:, start:stop] = new
        if self is cache.cores[-1]:
            cache.length = stop
        k_BTGK, v_BTGK = (kept[:, :stop] for kept in self.kept)
        mask = _mask(start, num_new, inputs, q_BSHK.device)
        return attend(q_BSHK, k_BTGK, v_BTGK, mask=mask, causal=mask is None and num_new > 1)


def _mask(start: int, num_new: int, document_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """Which of all tokens each new one may see, bool [B or 1, 1, S, T]; None where all up to itself."""
    if document_ids is None and (start == 0 or num_new == 1):
        return None
    places = torch.arange(start + num_new, device=device)
    mask = (places[None, :] <= places[start:, None])[None]
    if document_ids is not None:
        mask = mask & (document_ids[:, start:, None] == document_ids[:, None, :])
    return mask.unsqueeze(1)


@contextmanager
def kv_cache(model: nn.Module, capacity: int) -> Iterator[KvCache]:
    """Makes every forward of a model go on where the one before it stopped, for as long as the context lasts.

    Forwards take new tokens only, with their positions, and without gradients. Sequence parallelism must be off: a
    single token cannot be split.

    Args:
        model: The model; its attention layers may be split over ranks.
        capacity: Most tokens of a row.

    Raises:
        ValueError: If the model has no attention layer, or one whose core is not the plain one.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    cores = [layer.core for layer in layers]
    if not layers or not all(isinstance(core, SdpaCore) for core in cores):
        raise ValueError(
            f"a cache needs attention layers with a plain core, but {type(model).__name__} has {cores[:1]}; lay the "
            "model out without cp, whose ranks can shard parameters as dp_shard does"
        )
    cache = KvCache(capacity)
    try:
        for layer in layers:
            core = CachedCore(cache)
            cache.cores.append(core)
            layer.core = core
        yield cache
    finally:
        for layer, plain in zip(layers, cores, strict=True):
            layer.core = plain
