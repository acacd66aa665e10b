"""Compiled blocks give the numbers and names of uncompiled ones, on every layout."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel.compile
import parallel.tensor_parallel
from models.llama.config import LlamaConfig
from parallel import ParallelConfig
from parallel.activation_checkpoint import POLICIES
from tests.parallel.small_model import Run, batches, build, difference, sgd, train
from tests.parallel.test_activation_checkpoint import (
    FULL,
    ONE,
    SELECTIVE,
    WITHIN,
    change_between_save_and_load,
    refused,
)
from tests.ranks import run_ranks

COMPILE: dict[str, Any] = {"compile": True}
TP: dict[str, Any] = {"tp": 2}
TIMEOUT_S = 280.0

# Where code generation is not what a test is about, the same graphs run without it, in a fifth of the time.
GRAPHS_ONLY = "aot_eager"


@contextmanager
def compiling(backend: str) -> Iterator[None]:
    """Nothing compiled before, and a backend of our choice."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before, parallel.compile.BACKEND = parallel.compile.BACKEND, backend
    try:
        yield
    finally:
        parallel.compile.BACKEND = before


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train_compiled(config: ParallelConfig, backend: str) -> Run:
    with compiling(backend):
        run = train_two_steps(config)
        assert num_graphs() > 0
    return run


def train_two_steps(config: ParallelConfig) -> Run:
    return train(config, sgd, steps=2)


@cache
def one_process() -> Run:
    run: Run = run_ranks(1, train_two_steps, ParallelConfig(**ONE))[0]
    return run


def worst_difference(run: Run) -> float:
    reference = one_process()
    losses = difference(run.losses, reference.losses)
    return max(losses, *(difference(run.parameters[fqn], reference.parameters[fqn]) for fqn in reference.parameters))


@pytest.mark.parametrize(
    ("world_size", "fields", "backend"),
    [
        pytest.param(1, {}, "inductor", id="generated code", marks=pytest.mark.slow),
        pytest.param(2, TP | FULL, GRAPHS_ONLY, id="tp 2, full checkpointing"),
    ],
)
def test_compiled_blocks_train_like_one_process(world_size: int, fields: dict[str, Any], backend: str) -> None:
    config = ParallelConfig(**COMPILE, **fields)
    run = run_ranks(world_size, train_compiled, config, backend, timeout_s=110)[0]
    assert worst_difference(run) < 1e-13


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [{}, FULL, SELECTIVE], ids=["none", "full", "selective"])
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {}), (2, TP), (2, TP | {"sequence_parallel": False}), (4, TP)],
    ids=["full_shard 2", "tp 2", "tp 2 without sequence parallel", "full_shard 2 x tp 2"],
)
def test_generated_code_trains_like_one_process(world_size: int, layout: dict[str, Any], mode: dict[str, Any]) -> None:
    config = ParallelConfig(**COMPILE, **layout, **mode)
    run = run_ranks(world_size, train_compiled, config, "inductor", timeout_s=TIMEOUT_S)[0]
    assert worst_difference(run) < 1e-13


def test_the_embedding_has_a_gradient_under_tp_because_its_output_is_copied() -> None:
    """Else compiled blocks take a collective's unfinished result, and autograd loses its way back in silence."""
    [(with_copy, without_copy), _] = run_ranks(2, embedding_gradients)
    assert difference(with_copy[1], with_copy[0]) < 1e-13
    assert without_copy[0].abs().max() > 0
    assert without_copy[1].abs().max() == 0, "torch has repaired this: the copy is needed no more"


def embedding_gradients() -> list[tuple[Tensor, Tensor]]:
    """The embedding's gradient on this rank, uncompiled and compiled; first with the copy, then without it."""
    pairs = [pair_of_gradients()]
    copy = parallel.tensor_parallel._copy_output
    parallel.tensor_parallel._copy_output = lambda _module, _inputs, output: output
    try:
        pairs.append(pair_of_gradients())
    finally:
        parallel.tensor_parallel._copy_output = copy
    return pairs


def pair_of_gradients() -> tuple[Tensor, Tensor]:
    def gradient(fields: dict[str, Any]) -> Tensor:
        trained = build(ParallelConfig(**TP, **fields))
        trained.forward_backward(batches(trained.mesh, 0))
        embedding = trained.named_parameters()["embed.weight"].grad
        return embedding.to_local().clone()  # type: ignore[union-attr]

    with compiling(GRAPHS_ONLY):
        return gradient({}), gradient(COMPILE)


@pytest.mark.parametrize("fields", [TP, SELECTIVE], ids=["tp", "selective"])
def test_more_blocks_than_dynamo_recompiles_share_one_graph(fields: dict[str, Any]) -> None:
    assert set(run_ranks(2, graphs_of_many_blocks, fields)) == {1}


def graphs_of_many_blocks(fields: dict[str, Any]) -> int:
    with compiling(GRAPHS_ONLY):
        trained = build(ParallelConfig(**COMPILE, **fields), LlamaConfig(num_layers=10))
        trained.forward_backward(batches(trained.mesh, 0))
        return num_graphs()


def test_other_lengths_and_evaluation_need_few_graphs_and_give_the_same_logits() -> None:
    [(worst, graphs)] = run_ranks(1, lengths)
    assert worst < 1e-13
    # Training, evaluation, logits of one length and of any, the last without document ids.
    assert graphs <= 4


def lengths() -> tuple[float, int]:
    worst = 0.0
    with compiling(GRAPHS_ONLY):
        plain, compiled = build(ParallelConfig(**ONE)), build(ParallelConfig(**ONE, **COMPILE))
        mine = batches(plain.mesh, 0)
        for trained in (plain, compiled):
            trained.forward_backward(mine)
        worst = max(worst, abs(plain.evaluate(mine).loss - compiled.evaluate(mine).loss))
        for length in (7, 9, 12, 30):
            tokens = torch.arange(2 * length).view(2, length)
            worst = max(worst, difference(compiled.logits(tokens), plain.logits(tokens)))
        return worst, num_graphs()


def test_checkpoints_and_names_know_nothing_of_compile(tmp_path: Path) -> None:
    changes = [(COMPILE, {}), ({}, COMPILE | SELECTIVE), (COMPILE | FULL, COMPILE)]
    assert run_ranks(2, change_compile, str(tmp_path), changes) == [[]] * 2


def change_compile(folder: str, changes: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    with compiling(GRAPHS_ONLY):
        return change_between_save_and_load(folder, changes)


def test_a_policy_decides_what_a_compiled_block_keeps() -> None:
    modes = [FULL, *(SELECTIVE | {"activation_checkpoint_policy": each} for each in ("attention", "matmuls")), {}]
    [kept] = run_ranks(1, saved_bytes, modes)
    assert kept == sorted(set(kept))


def saved_bytes(modes: list[dict[str, Any]]) -> list[int]:
    """Bytes that autograd keeps for backward in each mode, parameters left out."""
    kept = []
    for mode in modes:
        with compiling(GRAPHS_ONLY):
            trained = build(ParallelConfig(**ONE, **COMPILE, **mode))
            own = {each.untyped_storage().data_ptr() for each in trained.source.parameters()}
            saved: dict[int, int] = {}

            def note(tensor: Tensor, own: set[int] = own, saved: dict[int, int] = saved) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                trained.forward_backward(batches(trained.mesh, 0))
            kept.append(sum(saved.values()))
    return kept


@pytest.mark.parametrize(
    ("fields", "environment", "message"),
    [
        ({"sharding": WITHIN}, {}, "compile=True sees each block as one sequence of ops, but 12 sharding units lie"),
        ({}, {"CXX": "no-such-compiler"}, "needs a C\\+\\+ compiler on the CPU and 'no-such-compiler' was not found"),
    ],
    ids=["units within blocks", "no compiler"],
)
def test_what_cannot_be_compiled_is_refused_before_anything_is_changed(
    fields: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    [(said, changed)] = run_ranks(1, refused_in, COMPILE | fields, environment)
    assert re.search(message, said), said
    assert not changed


def test_a_policy_that_computes_attention_again_is_not_compiled_under_tp() -> None:
    for said, changed in run_ranks(2, refused_policy):
        assert "'nothing kept' computes attention again, which torch 2.13 cannot compile under tp=2" in said
        assert not changed


def refused_policy() -> tuple[str, bool]:
    POLICIES["nothing kept"] = lambda: lambda op, arguments: False
    try:
        return refused(COMPILE | TP | SELECTIVE | {"activation_checkpoint_policy": "nothing kept"})
    finally:
        del POLICIES["nothing kept"]


def refused_in(fields: dict[str, Any], environment: dict[str, str]) -> tuple[str, bool]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return refused(fields)


def test_asking_for_a_gpu_compiler_needs_no_module_that_something_else_has_imported() -> None:
    code = "from parallel.compile import check_compiler\ntry:\n    check_compiler('cuda')\nexcept ValueError:\n    pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
