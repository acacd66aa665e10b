"""Initial values depend on the seed and on names alone, and drawing them takes little memory."""

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpoint import TrainState, load, save
from models.layers.rotary import RotaryScaling
from models.llama import Llama, LlamaConfig, llama_plan
from parallel import ParallelConfig, Trained, build_mesh, materialize, parallelize, replicas
from parallel.materialize import allocate, seed_of
from parallel.plan import ParallelPlan
from parallel.replicas import local_part
from tests.parallel.small_model import build, whole
from tests.ranks import run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied_embeddings": True},
    # Neither vocabulary nor widths divide; on 3 ranks a norm of 2 components leaves an empty shard.
    "uneven": {
        "vocab_size": 259,
        "width": 40,
        "head_dim": 2,
        "num_heads": 4,
        "feed_forward_width": 44,
        "attention_bias": True,
        "qk_norm": True,
    },
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"none": {"data_parallel": "none"}, "full_shard-1": {}},
    2: {"full_shard-2": {}, "tp-2": {"tp": 2}, "tp-2 without sequence": {"tp": 2, "sequence_parallel": False}},
    3: {"full_shard-3": {}},
    4: {
        "full_shard-4": {},
        "tp-4": {"tp": 4},
        "full_shard-2 x tp-2": {"tp": 2},
        "hybrid_shard-2x2": {"strategy": "hybrid_shard", "dp_replicate": 2},
    },
}

Digests = dict[str, str]
"""Digest of each parameter's values, by fqn."""


def model_config(name: str) -> LlamaConfig:
    return LlamaConfig(num_layers=1, **MODELS[name])


def digests(trained: Trained, dtype: torch.dtype) -> Digests:
    named = {fqn: whole(parameter) for fqn, parameter in trained.named_parameters().items()}
    return {fqn: hashlib.sha256(each.to(dtype).numpy().tobytes()).hexdigest() for fqn, each in named.items()}


def digests_of_layouts(layouts: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Digests]:
    """The values of each model on each layout, drawn in float64 for every other one."""
    found = {}
    for number, (layout, fields) in enumerate(layouts.items()):
        for model in MODELS:
            dtype = (torch.float32, torch.float64)[number % 2]
            trained = build(ParallelConfig(**fields), model_config(model), dtype=dtype)
            # float64 parameters hold what float32 ones do, bit by bit.
            values = [whole(parameter) for parameter in trained.named_parameters().values()]
            assert all(torch.equal(each, each.float().to(dtype)) for each in values)
            found[layout, model] = digests(trained, torch.float32)
    return found


def test_initial_values_are_bitwise_equal_on_every_mesh_and_in_every_dtype() -> None:
    on_rank = {size: run_ranks(size, digests_of_layouts, layouts) for size, layouts in LAYOUTS.items()}
    assert all(each == found[0] for found in on_rank.values() for each in found)
    by_layout = {key: each for found in on_rank.values() for key, each in found[0].items()}
    for (layout, model), each in by_layout.items():
        assert each == by_layout["none", model], (layout, model)
    assert len({layout for layout, _ in by_layout}) == 10


def test_another_seed_or_another_name_gives_other_values() -> None:
    first, second = run_ranks(1, digests_of_seeds)[0]
    drawn = [fqn for fqn in first if "norm" not in fqn]
    assert all(first[fqn] != second[fqn] for fqn in drawn)
    assert len({first[fqn] for fqn in drawn}) == len(drawn)
    assert seed_of(1, "2.x") != seed_of(12, ".x")


def digests_of_seeds() -> list[Digests]:
    config = ParallelConfig(data_parallel="none")
    return [digests(build(config, LlamaConfig(), seed=seed), torch.float64) for seed in (0, 1)]


def test_shards_on_a_cpu_mesh_are_not_drawn_alike() -> None:
    parts: list[Tensor] = run_ranks(2, own_rows)
    assert not torch.equal(*parts)


def own_rows() -> Tensor:
    return local_part(build(ParallelConfig()).named_parameters()["blocks.0.attention.q_proj.weight"]).clone()


class LiveBytes(TorchDispatchMode):
    """Follows the memory of the tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                self._hold(tensor)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        self.live += 0 if self._holders[key] else size
        self._holders[key] += 1
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        self.live -= 0 if self._holders[key] else size


@contextmanager
def small_hash_chunks() -> Iterator[None]:
    """Hashing takes a constant amount of memory, which would be most of that of a small model."""
    kept, replicas.CHUNK_ELEMENTS = replicas.CHUNK_ELEMENTS, 64
    try:
        yield
    finally:
        replicas.CHUNK_ELEMENTS = kept


def test_drawing_values_holds_one_whole_parameter_beside_the_shards() -> None:
    for size, tp in ((1, 1), (2, 1), (2, 2)):
        for extra, largest in run_ranks(size, extra_bytes, ParallelConfig(tp=tp)):
            assert largest <= extra < 1.1 * largest, (size, tp)


def extra_bytes(config: ParallelConfig) -> tuple[int, int]:
    """Bytes beyond the shards while they are drawn, and those of the largest parameter."""
    model_config = LlamaConfig(num_layers=1, width=128, vocab_size=1024)
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(model_config)
    trained = parallelize(model, mesh, config, llama_plan(model_config))
    with small_hash_chunks(), LiveBytes() as memory:
        materialize(trained)
    parameters = trained.named_parameters().values()
    shards = sum(local_part(each).nbytes for each in parameters)
    return memory.peak - shards, max(each.numel() * each.element_size() for each in parameters)


@pytest.mark.parametrize("scaling", [None, RotaryScaling(original_sequence_length=16)], ids=["plain", "llama3"])
def test_a_model_built_on_meta_over_dirty_memory_computes_what_a_real_one_does(scaling: RotaryScaling | None) -> None:
    config = LlamaConfig(num_layers=1, rope_scaling=scaling)
    model = Llama(config).double()
    for fqn, parameter in model.named_parameters():
        values = torch.empty(parameter.shape)
        model.init_parameter(fqn, values, torch.Generator().manual_seed(seed_of(0, fqn)))
        parameter.data.copy_(values)
    with torch.no_grad():
        expected = model(tokens())
    for size in (1, 2):
        for logits, num_buffers in run_ranks(size, logits_over_dirty_memory, config):
            assert num_buffers == 0
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-14)


def tokens() -> Tensor:
    return torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))


def logits_over_dirty_memory(config: LlamaConfig) -> tuple[Tensor, int]:
    # Freed at once, so that what is allocated next lies on NaN.
    dirty = [torch.full((size,), float("nan"), dtype=torch.float64) for size in (4, 16, 64, 256, 4096, 16_384) * 8]
    del dirty
    trained = build(ParallelConfig(), config)
    return trained.logits(tokens()), len(list(trained.model.buffers()))


@pytest.mark.parametrize("scaling", [None, RotaryScaling(original_sequence_length=16)], ids=["plain", "llama3"])
def test_rotary_tables_are_right_at_once_after_a_checkpoint_is_loaded(
    scaling: RotaryScaling | None, tmp_path: Path
) -> None:
    config = LlamaConfig(num_layers=1, rope_scaling=scaling)
    for expected, logits, num_buffers in run_ranks(2, logits_after_loading, config, tmp_path):
        assert num_buffers == 0
        assert torch.equal(logits, expected)


def logits_after_loading(config: LlamaConfig, folder: Path) -> tuple[Tensor, Tensor, int]:
    """Logits of a model, and of one that got all that it has from a checkpoint of it, over memory full of NaN."""
    trained = build(ParallelConfig(), config)
    expected = trained.logits(tokens())
    path = save(folder, TrainState(trained=trained))
    mesh = build_mesh(ParallelConfig())
    with torch.device("meta"):
        model = Llama(config).double()
    loaded = parallelize(model, mesh, ParallelConfig(), llama_plan(config))
    dirty = [torch.full((size,), float("nan"), dtype=torch.float64) for size in (4, 16, 64, 256, 4096, 16_384) * 8]
    del dirty
    allocate(loaded)
    load(path, TrainState(trained=loaded))
    return expected, loaded.logits(tokens()), len(list(loaded.model.buffers()))


def test_what_a_checkpoint_leaves_out_shows_as_nan() -> None:
    assert all(run_ranks(2, allocated_is_nan))


def allocated_is_nan() -> bool:
    config = ParallelConfig()
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(LlamaConfig(num_layers=1))
    trained = parallelize(model, mesh, config, llama_plan(LlamaConfig(num_layers=1)))
    allocate(trained)
    return all(bool(local_part(each).isnan().all()) for each in trained.named_parameters().values())


def test_a_model_that_cannot_draw_its_values_is_refused_by_name() -> None:
    assert "_Bare has no init_parameter" in run_ranks(1, refusal_of_a_bare_model)[0]


class _Bare(nn.Linear):
    pass


def refusal_of_a_bare_model() -> str:
    config = ParallelConfig(data_parallel="none")
    with torch.device("meta"):
        model = _Bare(2, 2)
    trained = parallelize(model, build_mesh(config), config, ParallelPlan(shape=LlamaConfig().shape))
    with pytest.raises(TypeError) as caught:
        materialize(trained)
    return str(caught.value)
