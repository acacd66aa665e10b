"""Ranks that share experts exchange rows and nothing else, keep their own experts, and say what they cannot do."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from models.moe import Moe, MoeConfig, moe_plan
from models.moe.experts import Experts, LocalDispatch
from parallel import CollectiveCounter, ParallelConfig, Precision, build_mesh, parallelize
from parallel.expert_parallel import ExpertParallelDispatch
from tests.models.moe.small_moe import build
from tests.parallel.small_model import GLOBAL_BATCH, SEQUENCE_LENGTH, adamw, batches, difference
from tests.ranks import run_ranks

E, D, H = 6, 5, 7


def all_experts() -> Experts:
    experts = Experts(E, D, H).double()
    generator = torch.Generator().manual_seed(0)
    for each in experts.parameters():
        each.data = torch.randn(each.shape, generator=generator, dtype=torch.float64)
    return experts


def tokens_of(rank: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Some tokens of a rank, their weights and experts."""
    generator = torch.Generator().manual_seed(1 + rank)
    num_tokens = {"the second rank has none": 9 * (1 - rank), "uneven": 4 + 5 * rank}.get(kind, 8)
    scores = torch.rand(num_tokens, E, generator=generator)
    if kind == "all to the last rank":
        scores[:, E // 2 :] += 1
    x_TD = torch.randn(num_tokens, D, generator=generator, dtype=torch.float64)
    return x_TD, torch.rand(num_tokens, 2, generator=generator, dtype=torch.float64), scores.topk(2).indices


def exchanged(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of this rank's tokens, and gradients of its experts."""
    rank, half = dist.get_rank(), E // dist.get_world_size()
    experts = all_experts()
    for each in experts.parameters():
        each.data = each.data[rank * half : (rank + 1) * half].clone()
    x_TD, weights_TK, experts_TK = tokens_of(rank, kind)
    inputs = (x_TD.requires_grad_(), weights_TK.requires_grad_())
    assert dist.group.WORLD is not None
    out = ExpertParallelDispatch(LocalDispatch(), dist.group.WORLD)(*inputs, experts_TK, experts)
    gradients = torch.autograd.grad(out.square().sum(), (*inputs, *experts.parameters()))
    return [out.detach(), *gradients[:2]], list(gradients[2:])


@pytest.mark.parametrize("kind", ["even", "uneven", "all to the last rank", "the second rank has none"])
def test_tokens_get_from_experts_of_other_ranks_what_one_process_gives_them(kind: str) -> None:
    experts, parts = all_experts(), [tokens_of(rank, kind) for rank in range(2)]
    x_TD, weights_TK, experts_TK = (torch.cat(each) for each in zip(*parts, strict=True))
    inputs = (x_TD.requires_grad_(), weights_TK.requires_grad_())
    out = LocalDispatch()(*inputs, experts_TK, experts)
    gradients = torch.autograd.grad(out.square().sum(), (*inputs, *experts.parameters()))
    of_tokens, of_experts = zip(*run_ranks(2, exchanged, kind), strict=True)
    for mine, other in zip(map(torch.cat, zip(*of_tokens, strict=True)), (out, *gradients[:2]), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)
    for mine, other in zip(map(torch.cat, zip(*of_experts, strict=True)), gradients[2:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


def layouts_of_experts(fields: dict[str, Any], model: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Placements and local shape of each kind of parameter of the first layer's experts."""
    trained = build(ParallelConfig(**fields), model)
    found = {}
    for fqn, each in trained.named_parameters().items():
        if fqn.startswith("blocks.0.feed_forward.experts"):
            assert isinstance(each, DTensor)
            names = each.device_mesh.mesh_dim_names or ()
            dims = {name: placement.dim for name, placement in zip(names, each.placements, strict=True)}  # type: ignore[attr-defined]
            found[fqn.rpartition(".")[2]] = (dims, tuple(each.to_local().shape))
    return found


def test_experts_are_split_over_ep_and_each_over_what_is_left() -> None:
    for found in run_ranks(4, layouts_of_experts, {"ep": 2}, {}):
        assert found["gate_proj"] == ({"expert_fsdp": 0, "ep": 0}, (2, 64, 64))
    # One expert on two ranks: each has half of its rows, and no rank is left without any.
    few = {"num_experts": 2, "num_experts_per_token": 1, "expert_width": 32}
    for found in run_ranks(4, layouts_of_experts, {"ep": 2}, few):
        assert found["gate_proj"] == found["up_proj"] == ({"expert_fsdp": 1, "ep": 0}, (1, 32, 32))
        assert found["down_proj"] == ({"expert_fsdp": 1, "ep": 0}, (1, 16, 64))
    for found in run_ranks(4, layouts_of_experts, {"ep": 2, "tp": 2}, {}):
        assert found["gate_proj"] == ({"expert_fsdp": 0, "ep": 0, "tp": 2}, (4, 64, 32))
        assert found["down_proj"] == ({"expert_fsdp": 0, "ep": 0, "tp": 1}, (4, 32, 64))


def counted(fields: dict[str, Any]) -> tuple[Counter[tuple[str, str, str]], Counter[tuple[str, str, str]]]:
    """Collectives of a step that only experts cause, and the bytes that they send."""
    trained = build(ParallelConfig(**fields), {})
    mine = batches(trained.mesh, 0)
    trained.forward_backward(mine)
    with CollectiveCounter(trained.mesh) as counter:
        trained.forward_backward(mine)
    numbers: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for each in counter.records:
        if each.view in ("ep", "expert_fsdp"):
            numbers[each.kind, each.view, each.phase] += 1
            sizes[each.kind, each.view, each.phase] += each.payload_bytes
    return numbers, sizes


@pytest.mark.parametrize("recomputed", ["none", "full", "selective"])
def test_a_layer_exchanges_three_times_forward_and_twice_backward(recomputed: str) -> None:
    layers, experts, width, hidden, itemsize = 2, 8, 64, 64, 8
    rows = GLOBAL_BATCH * SEQUENCE_LENGTH * 2 * width * itemsize
    # Numbers of rows, rows, and rows back; their gradients. All forward ones again where a block is computed again.
    again = 3 * layers if recomputed != "none" else 0
    found = run_ranks(4, counted, {"ep": 2, "activation_checkpointing": recomputed})
    for numbers, sizes in found:
        assert numbers["all_to_all", "ep", "forward"] == 3 * layers
        assert numbers["all_to_all", "ep", "backward"] == 2 * layers + again
        # Gathered once forward, once backward, however often a block is computed.
        own = layers * 3 * experts // 2 * width * hidden * itemsize
        for kind, phase in (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")):
            assert numbers[kind, "expert_fsdp", phase] == layers
            assert sizes[kind, "expert_fsdp", phase] == own
    # Whatever the routing, all ranks together send each row there and back.
    number_bytes = 4 * layers * experts * 8
    sent = {phase: sum(sizes["all_to_all", "ep", phase] for _, sizes in found) for phase in ("forward", "backward")}
    assert sent["forward"] == 2 * layers * rows + number_bytes
    assert sent["backward"] == 2 * layers * rows + (again > 0) * sent["forward"]


def bf16_losses(fields: dict[str, Any]) -> list[float]:
    precision = Precision(compute="bfloat16", reduce="float32")
    trained = build(ParallelConfig(**fields, precision=precision), {}, dtype=torch.float32)
    optimizer = trained.build_optimizer(adamw)
    losses = []
    for step in range(2):
        losses.append(trained.forward_backward(batches(trained.mesh, step)).loss)
        optimizer.step()
    assert all(each.dtype == torch.float32 for each in trained.named_parameters().values())
    return losses


def test_experts_compute_in_bfloat16_too() -> None:
    one, split = run_ranks(2, bf16_losses, {})[0], run_ranks(2, bf16_losses, {"ep": 2})[0]
    assert difference(split, one) < 2**-8


def refusals() -> list[str]:
    config = ParallelConfig(ep=2)
    plan, messages = moe_plan(MoeConfig()), []
    for silent in (replace(plan, experts=()), replace(plan, dispatches=())):
        with torch.device("meta"):
            model = Moe(MoeConfig())
        with pytest.raises(ValueError) as caught:
            parallelize(model, build_mesh(config), config, silent)
        messages.append(str(caught.value))
        assert all(type(each) is torch.nn.Parameter for each in model.parameters())
    return messages


def test_a_plan_that_does_not_say_where_experts_are_is_refused_before_anything_is_changed() -> None:
    for messages in run_ranks(2, refusals):
        for message in messages:
            assert "the plan names no experts or no dispatches; name them, or use ep=1" in message


def gradients(divide: bool) -> dict[str, Tensor]:
    """Gradients of a step, as they are and as torch scales them if it is not told otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        if divide:
            patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda module, factor: None)
            # gloo cannot multiply before it sums, as torch would here.
            patch.setattr(FSDPModule, "set_force_sum_reduction_for_comms", lambda module, enable: None)
        trained = build(ParallelConfig(ep=2), {})
    trained.forward_backward(batches(trained.mesh, 0))
    found = {fqn: each.grad for fqn, each in trained.named_parameters().items()}
    return {fqn: each.full_tensor() for fqn, each in found.items() if isinstance(each, DTensor)}


def test_torch_would_scale_gradients_of_experts_by_ep_beside_the_others() -> None:
    """A control of the parity of experts: each unit is divided by the ranks that shard it, and experts have fewer."""
    summed, divided = (run_ranks(4, gradients, divide)[0] for divide in (False, True))
    for fqn, whole in summed.items():
        ranks = 2 if ".experts." in fqn else 4
        torch.testing.assert_close(divided[fqn] * ranks, whole, rtol=1e-12, atol=1e-18)
