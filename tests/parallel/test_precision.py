"""bfloat16 compute trains like float32, because parameters and optimizer state stay float32."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import Batch, CollectiveCounter, ParallelConfig, Precision, build_mesh, materialize, parallelize
from tests.parallel.small_model import CONFIG, batches, build, whole
from tests.ranks import run_ranks

BF16 = Precision(compute="bfloat16", reduce="float32")
MODEL = LlamaConfig(num_layers=2, width=64, num_heads=4, num_kv_heads=2)
LENGTH, ROWS, STEPS = 64, 8, 100
LR = 1e-3
NATS = 0.02
"""How far held-out losses may lie apart."""


def real_text() -> Tensor:
    """Bytes of the source of Python's standard library, in rows."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: (STEPS * ROWS + 64) * (LENGTH + 1)]
    found = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, LENGTH + 1)
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]


def to_batch(rows: Tensor) -> Batch:
    return Batch.from_tokens(rows[:, :-1], rows[:, 1:])


def held_out_loss(precision: Precision, stored: torch.dtype) -> float:
    """Loss on text that was not trained on, computed in float32, after the steps."""
    config = ParallelConfig(precision=precision)
    mesh = build_mesh(config)
    with torch.device("meta"):
        model = Llama(MODEL).to(stored)
    trained = parallelize(model, mesh, config, llama_plan(MODEL))
    materialize(trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        optimizer = trained.build_optimizer(lambda named: torch.optim.AdamW(named.values(), lr=LR, betas=(0.9, 0.95)))
    text = real_text()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (STEPS - step) / STEPS)
        trained.forward_backward([to_batch(text[64 + step * ROWS : 64 + (step + 1) * ROWS])])
        trained.clip_gradients(1.0)
        optimizer.step()
    return trained.evaluate([to_batch(text[:64])]).loss


def losses() -> tuple[float, float, float]:
    """With float32, with bfloat16 compute, and with parameters that are stored in bfloat16."""
    plain = Precision()
    return (
        held_out_loss(plain, torch.float32),
        held_out_loss(BF16, torch.float32),
        held_out_loss(plain, torch.bfloat16),
    )


def test_bf16_compute_reaches_the_held_out_loss_of_float32_and_bf16_parameters_do_not() -> None:
    full, mixed, stored = run_ranks(1, losses)[0]
    assert full < 4.0, "hardly below the 5.5 nats of a guess: nothing was learned that could be lost"
    assert abs(mixed - full) < NATS
    assert stored - full > NATS


def test_bf16_compute_keeps_parameters_gradients_and_optimizer_state_in_float32() -> None:
    for dtypes, activations, logits in run_ranks(4, dtypes_of_a_step):
        assert dtypes == {"parameter": {torch.float32}, "gradient": {torch.float32}, "state": {torch.float32}}
        # The embedding and a block give bfloat16, and so are the logits; the loss is float32.
        assert activations == [torch.bfloat16, torch.bfloat16, torch.float32]
        assert logits == torch.bfloat16


def dtypes_of_a_step() -> tuple[dict[str, set[torch.dtype]], list[torch.dtype], torch.dtype]:
    config = ParallelConfig(precision=BF16, tp=2)
    trained = build(config, LlamaConfig(num_layers=1, qk_norm=True), dtype=torch.float32)
    optimizer = trained.build_optimizer(lambda named: torch.optim.AdamW(named.values()))
    activations: list[torch.dtype] = []
    hooks = [
        trained.source.get_submodule(fqn).register_forward_hook(lambda _m, _i, output: activations.append(output.dtype))
        for fqn in ("embed", "blocks.0", "head")
    ]
    trained.forward_backward(batches(trained.mesh, 0, 2)[:1])
    for hook in hooks:
        hook.remove()
    parameters = trained.named_parameters().values()
    gradients = {each.grad.dtype for each in parameters if each.grad is not None}
    trained.clip_gradients(1.0)
    optimizer.step()
    state = {value.dtype for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)}
    dtypes = {"parameter": {each.dtype for each in parameters}, "gradient": gradients, "state": state}
    return dtypes, activations, trained.logits(torch.ones(1, 4, dtype=torch.int64)).dtype


def test_an_optimizer_over_bfloat16_parameters_is_warned_of_and_one_over_float32_is_not() -> None:
    assert run_ranks(1, warnings_of, torch.float32)[0] == []
    (message,) = run_ranks(1, warnings_of, torch.bfloat16)[0]
    assert "12 parameters are stored in bfloat16 (embed.weight" in message
    assert "store float32 and set precision=Precision(compute='bfloat16', reduce='float32')" in message


def warnings_of(dtype: torch.dtype) -> list[str]:
    trained = build(ParallelConfig(), LlamaConfig(num_layers=1), dtype=dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained.build_optimizer(lambda named: torch.optim.SGD(named.values()))
    return [str(each.message) for each in caught]


def losses_and_logits(precision: Precision, backend: str) -> tuple[float, torch.dtype, int]:
    config = ParallelConfig(precision=precision, data_parallel=backend)  # type: ignore[arg-type]
    trained = build(config, dtype=torch.float32)
    mine = batches(trained.mesh, 0)
    with CollectiveCounter(trained.mesh) as counter:
        loss = trained.forward_backward(mine).loss_sum
    reduced = sum(each.payload_bytes for each in counter.records if each.phase == "backward" and "reduce" in each.kind)
    return loss, trained.logits(mine[0].tokens).dtype, reduced


def test_the_output_dtype_is_that_of_logits_and_does_not_touch_the_loss() -> None:
    for backend in ("fsdp2", "ddp"):
        plain, dtype, _ = run_ranks(2, losses_and_logits, Precision(), backend)[0]
        assert dtype == torch.float32
        assert run_ranks(2, losses_and_logits, Precision(output="bfloat16"), backend)[0][:2] == (plain, torch.bfloat16)


def test_gradients_are_summed_in_the_dtype_that_is_asked_for() -> None:
    for backend in ("fsdp2", "ddp"):
        sent = {
            dtype: run_ranks(2, losses_and_logits, Precision(compute="bfloat16", reduce=dtype), backend)[0][2]
            for dtype in ("float32", "bfloat16")
        }
        assert sent["float32"] == CONFIG.num_parameters * 4
        assert sent["bfloat16"] == CONFIG.num_parameters * 2


def gradients_of_layouts(layouts: list[ParallelConfig]) -> list[dict[str, Tensor]]:
    """Gradients of two micro-batches of the same values, by layout."""
    found = []
    for layout in layouts:
        trained = build(layout, dtype=torch.float32)
        trained.forward_backward(batches(trained.mesh, 0) * 2)
        named = trained.named_parameters()
        found.append({fqn: whole(each.grad) for fqn, each in named.items() if each.grad is not None})
    return found


@pytest.mark.parametrize(
    ("backend", "world_size"), [("none", 1), ("dp", 1), ("ddp", 2), ("zero1", 2), ("fsdp1", 2), ("fsdp2", 2)]
)
@pytest.mark.filterwarnings("ignore:data_parallel='dp' splits")
def test_what_backward_computes_again_is_computed_in_the_compute_dtype_too(backend: str, world_size: int) -> None:
    plain = ParallelConfig(precision=BF16, data_parallel=backend)  # type: ignore[arg-type]
    again = [
        replace(plain, activation_checkpointing="full"),
        replace(plain, activation_checkpointing="full", activation_checkpoint_every=2),
        replace(plain, activation_checkpointing="selective"),
        replace(plain, activation_checkpointing="selective", activation_checkpoint_policy="attention"),
    ]
    expected, *found = run_ranks(world_size, gradients_of_layouts, [plain, *again])[0]
    for gradients in found:
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[fqn], each) for fqn, each in expected.items())
