"""Float16 models train with a scaled loss; all ranks skip a step that overflows on any of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint import TrainState, load, save
from models.llama import Llama, LlamaConfig, llama_plan
from parallel import CollectiveCounter, LossScaling, ParallelConfig, Precision, Trained, build_mesh, parallelize
from parallel.ledger.parts import model_parts
from parallel.ledger.term import counted_traffic, traffic
from parallel.ledger.traffic import StepShape, predict_traffic
from parallel.loss_scale import LossScale
from parallel.replicas import local_part
from tests.parallel.small_model import adamw, batches, build, difference, whole_parameters
from tests.ranks import run_ranks

ONE: dict[str, Any] = {"data_parallel": "none"}
PP: dict[str, Any] = {"pp": 2, "schedule": "1f1b"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "full_shard 2": (2, {}),
    "ddp 2": (2, {"data_parallel": "ddp"}),
    "zero1 2": (2, {"data_parallel": "zero1"}),
    "fsdp1 2": (2, {"data_parallel": "fsdp1"}),
    "tp 2": (2, {"tp": 2}),
    "pp 2": (2, PP),
    "full_shard 2 x tp 2": (4, {"tp": 2}),
    "cp 2 ulysses": (2, {"cp": 2, "cp_method": "ulysses"}),
}
SLOW = ("full_shard 2 x tp 2", "fsdp1 2", "zero1 2", "ddp 2", "cp 2 ulysses")


def half(fields: dict[str, Any], **scaling: Any) -> ParallelConfig:
    precision = Precision(compute="float16", reduce="float32", loss_scaling=LossScaling(**scaling))
    return ParallelConfig(**fields, precision=precision)


def small(config: ParallelConfig) -> Trained:
    return build(config, dtype=torch.float32)


def micro_batches(trained: Trained, step: int = 0) -> list[Any]:
    return batches(trained.mesh, step, 4 if trained.config.pp > 1 else 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS]
)
def test_an_overflow_on_one_rank_alone_skips_the_step_on_all(name: str) -> None:
    world_size, fields = LAYOUTS[name]
    results = run_ranks(world_size, overflow_on_the_last_rank, half(fields, initial=1024.0))
    for skipped, scale, unchanged, no_gradient, num_tokens, digest in results:
        assert skipped
        assert scale == {"value": 512.0, "num_good_steps": 0, "num_skipped": 1}
        assert unchanged
        assert no_gradient
        assert num_tokens > 0
        assert digest == results[0][-1]


def overflow_on_the_last_rank(config: ParallelConfig) -> tuple[bool, dict[str, Any], bool, bool, int, float]:
    """A good step, then one in which the last rank's own gradient is infinite once ranks have summed theirs."""
    trained = small(config)
    optimizer = trained.build_optimizer(adamw)
    trained.forward_backward(micro_batches(trained))
    trained.clip_gradients(1.0)
    optimizer.step()
    before = whole_parameters(trained)
    run = trained.backend.run_micro_batch

    def spoil() -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            held = [each.grad for each in trained.named_parameters().values() if each.grad is not None]
            next(part for part in map(local_part, held) if part.numel()).view(-1)[0] = torch.inf

    def then_spoil(model: nn.Module, compute: Any, *, reduce: bool) -> None:
        run(model, compute, reduce=reduce)
        spoil()

    if trained.pipeline is None:
        trained.backend.run_micro_batch = then_spoil  # type: ignore[method-assign]
    else:
        step = trained.pipeline.forward_backward

        def step_then_spoil(*args: Any) -> Tensor:
            losses = step(*args)
            spoil()
            return losses

        trained.pipeline.forward_backward = step_then_spoil  # type: ignore[method-assign, assignment]
    assert trained.loss_scale is not None
    result = trained.forward_backward(micro_batches(trained, 1))
    no_gradient = all(each.grad is None for each in trained.named_parameters().values())
    optimizer.step()
    after = whole_parameters(trained)
    unchanged = all(torch.equal(after[fqn], values) for fqn, values in before.items())
    digest = torch.stack([each.double().sum() for each in after.values()]).sum()
    if config.pp > 1:
        dist.all_reduce(digest)
    state = trained.loss_scale.state_dict()
    return result.skipped, state, unchanged, no_gradient, result.num_valid_tokens, digest.item()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS]
)
def test_gradients_are_those_of_float32_but_for_rounding_whatever_the_scale(name: str) -> None:
    world_size, fields = LAYOUTS[name]
    [exact] = run_ranks(1, gradients, ParallelConfig(**ONE))
    scaled = run_ranks(world_size, gradients, half(fields, initial=4096.0))
    found = {fqn: values for each in scaled for fqn, values in each.items()}
    assert found.keys() == exact.keys()
    worst = {fqn: difference(found[fqn], values) for fqn, values in exact.items()}
    assert max(worst.values()) < 2e-2, worst


def gradients(config: ParallelConfig) -> dict[str, Tensor]:
    """Clipped gradients of a step of two micro-batches or more."""
    trained = small(config)
    assert not trained.forward_backward(micro_batches(trained)).skipped
    trained.clip_gradients(0.05)
    named = trained.named_parameters()
    found = {fqn: trained.backend.to_canonical(fqn, each.grad) for fqn, each in named.items() if each.grad is not None}
    return {fqn: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone() for fqn, each in found.items()}


def test_a_scale_saves_gradients_that_float16_loses() -> None:
    [lost] = run_ranks(1, share_of_zeros, 1.0)
    [kept] = run_ranks(1, share_of_zeros, 65536.0)
    assert lost > 0.1
    assert kept < 0.5 * lost


def share_of_zeros(initial: float) -> float:
    """Of a gradient behind the embedding, with a loss as small as one of very many tokens is."""
    trained = small(half(ONE, initial=initial))
    many = micro_batches(trained)
    # As if a thousand times as many tokens were in the batch.
    head = trained.source.get_submodule("norm")
    head.register_full_backward_hook(_shrink)
    trained.forward_backward(many)
    gradient = trained.named_parameters()["blocks.0.attention.k_proj.weight"].grad
    assert gradient is not None
    return (gradient == 0).float().mean().item()


def _shrink(_module: nn.Module, inputs: Any, _outputs: Any) -> tuple[Tensor, ...]:
    return tuple(each / 4096 for each in inputs)


def test_the_scale_grows_after_a_row_of_good_steps_and_backs_off_at_once() -> None:
    scale = LossScale(LossScaling(initial=8.0, growth=4.0, growth_interval=3, backoff=0.25))
    seen = []
    for overflowed in (False, False, False, True, False, False, True, True, False, False, False):
        scale.update(overflowed=overflowed)
        seen.append(scale.value)
    assert seen == [8, 8, 32, 8, 8, 8, 2, 1, 1, 1, 4]
    assert scale.num_skipped == 3


def test_an_overflow_that_no_smaller_scale_can_prevent_is_an_error_on_all_ranks() -> None:
    for said, no_gradient in run_ranks(2, diverge, half({}, initial=2.0)):
        assert said.startswith("gradients are not finite although the loss scale is down at 1")
        assert "lower learning rate" in said
        assert no_gradient


def diverge(config: ParallelConfig) -> tuple[str, bool]:
    """Weights of the last rank are infinite: one step is skipped at scale 2, the next one is at 1."""
    trained = small(config)
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            local_part(trained.named_parameters()["norm.weight"])[:] = torch.inf
    assert trained.forward_backward(micro_batches(trained)).skipped
    with pytest.raises(FloatingPointError) as failure:
        trained.forward_backward(micro_batches(trained, 1))
    return str(failure.value), all(each.grad is None for each in trained.named_parameters().values())


def test_scale_and_counters_are_restored_exactly_and_the_run_goes_on_bitwise(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(2, save_and_go_on, str(tmp_path)):
        assert whole == resumed


def save_and_go_on(folder: str) -> tuple[Any, Any]:
    """Six steps of which some overflow, in one go, and the last three of them after a load."""
    ends = []
    for resumes in (False, True):
        trained = small(half({}, initial=2.0**40, growth=2.0, growth_interval=2, backoff=2.0**-12))
        optimizer = trained.build_optimizer(adamw)
        assert trained.loss_scale is not None
        state = TrainState(trained=trained, optimizer=optimizer, stateful={"loss_scale": trained.loss_scale})
        if resumes:
            load(folder, state)
        for step in range(3 if resumes else 0, 6):
            if step == 3 and not resumes:
                state.step = 3
                save(folder, state)
            if not trained.forward_backward(micro_batches(trained, step)).skipped:
                trained.clip_gradients(1.0)
                optimizer.step()
        values = {fqn: each.sum().item() for fqn, each in whole_parameters(trained).items()}
        ends.append((trained.loss_scale.state_dict(), values))
    assert ends[0][0]["num_skipped"] > 0
    assert ends[0][0]["value"] > 2.0**28 / 2.0**12
    return ends[0], ends[1]


@pytest.mark.parametrize("state", [{"value": 0.5}, {"value": float("inf")}, {"value": 8}, {"num_skipped": True}])
def test_a_damaged_state_of_a_scale_is_refused(state: dict[str, Any]) -> None:
    scale = LossScale(LossScaling())
    with pytest.raises(ValueError, match="is no state of a loss scale"):
        scale.load_state_dict({**scale.state_dict(), **state})


@pytest.mark.parametrize(
    ("world_size", "fields", "view"),
    [(2, {}, "fsdp"), (2, {"tp": 2}, "tp"), pytest.param(4, {"tp": 2}, "world", marks=pytest.mark.slow)],
)
def test_ranks_agree_by_one_all_reduce_of_4_bytes_which_the_ledger_predicts(
    world_size: int, fields: dict[str, Any], view: str
) -> None:
    for agreed, predicted, counted in run_ranks(world_size, counted_step, half(fields)):
        assert agreed == [("all_reduce", view, 4)]
        assert predicted == counted


def counted_step(config: ParallelConfig) -> tuple[Any, Any, Any]:
    trained = small(config)
    mine = batches(trained.mesh, 0, 2)
    trained.forward_backward(mine)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(mine)
        trained.clip_gradients(None)
    agreed = [(each.kind, each.view, each.payload_bytes) for each in counter.records if each.dtype == torch.int32]
    model_config = LlamaConfig(num_layers=2)
    parts = model_parts(Llama(model_config), trained.config, llama_plan(model_config))
    tokens = sum(each.tokens.numel() for each in mine)
    terms = predict_traffic(parts, StepShape(num_micro_batches=2, num_tokens=tokens, clips=True))
    return agreed, traffic(terms), counted_traffic(counter.records)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Precision(reduce="float16"),
            "reduce='float16' needs the loss scale that comes with compute='float16'",
        ),
        (lambda: Precision(compute="bfloat16", loss_scaling=LossScaling(initial=2.0)), "is for compute='float16'"),
        (lambda: LossScaling(initial=0.5), "initial >= 1"),
        (lambda: LossScaling(backoff=1.0), "0 < backoff < 1"),
        (lambda: LossScaling(growth_interval=0), "growth_interval=0 must be at least 1"),
    ],
)
def test_fields_that_say_nothing_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_parameters_stored_in_float16_are_refused_as_no_scale_saves_their_updates() -> None:
    [said] = run_ranks(1, stored_in_float16)
    assert "parameters are stored in float16 (embed.weight, " in said
    assert "store float32 and set precision=Precision(compute='float16'" in said


def stored_in_float16() -> str:
    config, model_config = half(ONE), LlamaConfig(num_layers=1)
    with torch.device("meta"):
        model = Llama(model_config).to(torch.float16)
    with pytest.raises(ValueError) as refusal:
        parallelize(model, build_mesh(config), config, llama_plan(model_config))
    return str(refusal.value)
