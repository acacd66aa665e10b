"""Cached logits are those of the whole sequence, on every mesh, and the cache holds what its shape says."""

import pytest
import torch
from torch import Tensor, nn

from models.layers.attention import Attention, SdpaCore
from models.layers.kv_cache import KvCache, kv_cache
from models.llama import Llama, LlamaConfig
from parallel import ParallelConfig, Trained
from tests.parallel.small_model import build, difference
from tests.ranks import run_ranks

LENGTH = 24
ROWS = 3
CONFIG = LlamaConfig(num_layers=2, qk_norm=True)
MESHES = [
    (1, ParallelConfig()),
    (2, ParallelConfig(tp=2, sequence_parallel=False)),
    (2, ParallelConfig(strategy="full_shard")),
]
IDS = ["one process", "tp 2", "full_shard 2"]
# Tokens of each forward, one after the other: prompts of several lengths and then token by token, and parts of several.
PARTS = [[1] * LENGTH, [2] + [1] * (LENGTH - 2), [17] + [1] * (LENGTH - 17), [5, 1, 6, 1, 1, 10], [LENGTH]]


def _tokens() -> Tensor:
    return torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def _documents() -> tuple[Tensor, Tensor]:
    """Documents and positions: each row has borders of its own, the first row none."""
    borders = torch.tensor([[LENGTH, LENGTH], [1, 9], [6, 17]])
    where = torch.arange(LENGTH).expand(ROWS, -1)
    document_ids = (where[:, :, None] >= borders[:, None, :]).sum(-1)
    starts = torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), borders], dim=1)
    return document_ids, where - starts.gather(1, document_ids)


def _in_parts(trained: Trained, parts: list[int], positions: Tensor, document_ids: Tensor | None) -> Tensor:
    """Logits of the whole sequence, computed part by part with a cache."""
    logits, start = [], 0
    with kv_cache(trained.source, LENGTH) as cache:
        for size in parts:
            part = slice(start, start + size)
            documents = None if document_ids is None else document_ids[:, part]
            logits.append(trained.logits(_tokens()[:, part], positions=positions[:, part], document_ids=documents))
            start += size
            assert cache.length == start
    return torch.cat(logits, dim=1)


def _differences(config: ParallelConfig) -> list[float]:
    trained = build(config, CONFIG)
    plain = torch.arange(LENGTH).expand(ROWS, -1)
    document_ids, positions = _documents()
    found = []
    for where, documents in ((plain, None), (positions, document_ids)):
        whole = trained.logits(_tokens(), positions=where, document_ids=documents)
        found += [difference(_in_parts(trained, parts, where, documents), whole) for parts in PARTS]
    return found


@pytest.mark.parametrize(("world_size", "config"), MESHES, ids=IDS)
def test_cached_logits_equal_those_of_the_whole_sequence(world_size: int, config: ParallelConfig) -> None:
    for found in run_ranks(world_size, _differences, config):
        assert len(found) == 2 * len(PARTS)
        assert max(found) <= 1e-12


def _bytes(config: ParallelConfig) -> int:
    trained = build(config, LlamaConfig(num_layers=2), dtype=torch.float32)
    with kv_cache(trained.source, 10) as cache:
        trained.logits(_tokens()[:, :3])
        first = cache.num_bytes
        cache.clear()
        trained.logits(_tokens()[:, :10])
        assert cache.num_bytes == first
    return first


@pytest.mark.parametrize(("world_size", "config"), MESHES, ids=IDS)
def test_a_rank_keeps_keys_and_values_of_its_own_heads_without_repetition(
    world_size: int, config: ParallelConfig
) -> None:
    # 2 layers x keys and values x rows x capacity x 4 heads of 8 in float32.
    expected = 2 * 2 * ROWS * 10 * (4 // config.tp) * 8 * 4
    assert run_ranks(world_size, _bytes, config) == [expected] * world_size


def _model() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(num_layers=2))


@torch.no_grad()
def test_the_model_is_as_before_afterwards_even_after_an_error() -> None:
    model, tokens = _model(), _tokens()
    before = model(tokens)
    cores = [module.core for module in model.modules() if isinstance(module, Attention)]
    with pytest.raises(ZeroDivisionError), kv_cache(model, LENGTH):
        model(tokens)
        raise ZeroDivisionError
    after = [module.core for module in model.modules() if isinstance(module, Attention)]
    assert all(one is other for one, other in zip(cores, after, strict=True))
    assert torch.equal(model(tokens), before)


@torch.no_grad()
def test_what_does_not_fit_the_tokens_before_is_refused() -> None:
    model, tokens = _model(), _tokens()
    documents = torch.zeros(ROWS, 4, dtype=torch.long)
    with kv_cache(model, 6) as cache:
        model(tokens[:, :4])
        with pytest.raises(ValueError, match="3 more tokens after 4 do not fit a cache of capacity=6"):
            model(tokens[:, :3])
        with pytest.raises(ValueError, match="the cache holds 3 rows, 2 came"):
            model(tokens[:2, :2])
        with pytest.raises(ValueError, match="for all tokens in a cache or for none"):
            model(tokens[:, :2], document_ids=documents[:, :2])
        cache.clear()
        # Other rows and documents are welcome now.
        model(tokens[:2, :4], document_ids=documents[:2])
        assert cache.length == 4


def test_a_cache_needs_room_and_a_model_with_plain_attention() -> None:
    with pytest.raises(ValueError, match="capacity=0 must be at least 1"):
        KvCache(0)
    with (
        pytest.raises(ValueError, match="needs attention layers with a plain core, but Linear has"),
        kv_cache(nn.Linear(2, 2), 4),
    ):
        pass
    model = _model()
    model.get_submodule("blocks.1.attention").core = nn.Identity()
    with pytest.raises(ValueError, match="needs attention layers with a plain core"), kv_cache(model, 4):
        pass
    # Nothing was changed half-way.
    assert isinstance(model.get_submodule("blocks.0.attention.core"), SdpaCore)
