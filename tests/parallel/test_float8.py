"""Linear maps in float8 give products and gradients within its rounding, and are refused where it is not there."""

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import parallel.compile
from models.layers.lora import LoraConfig, add_adapters
from models.llama import Llama, LlamaConfig, llama_plan
from parallel import ParallelConfig, Precision
from parallel.float8 import apply_float8, check_float8, float8_matmul
from tests.parallel.small_model import batches, build
from tests.ranks import run_ranks

FLOAT8 = Precision(compute="bfloat16", reduce="float32", float8=True)
# Of neighbours in e4m3 one is up to 1/8 larger than the other, so that rounding errs by 2.6 % of a value in the root
# mean square, twice as much in e5m2; the errors of two factors add in squares to 3.7 % and 5.8 %.
FORWARD, BACKWARD = 0.045, 0.07


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("shape", [(32, 48), (3, 5, 48), (1, 1, 48)], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_product_and_both_gradients_are_those_of_bfloat16_within_the_rounding_of_float8(
    shape: tuple[int, ...], size: float
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(1, *shape)[0] * size).bfloat16().requires_grad_()
    weight = torch.randn(64, 48).bfloat16().requires_grad_()
    out = float8_matmul(x, weight)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact_x, exact_weight = (each.detach().double().requires_grad_() for each in (x, weight))
    exact = torch.nn.functional.linear(exact_x, exact_weight)
    exact.backward(grad.double())
    assert (out.dtype, out.shape) == (torch.bfloat16, exact.shape)
    assert x.grad is not None and weight.grad is not None
    assert exact_x.grad is not None and exact_weight.grad is not None
    assert 1e-2 < error(out, exact) < FORWARD
    for found, wanted in ((x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert 1e-2 < error(found, wanted) < BACKWARD


def test_zeros_stay_zeros() -> None:
    out = float8_matmul(torch.zeros(4, 32).bfloat16(), torch.zeros(16, 32).bfloat16())
    assert torch.equal(out, torch.zeros(4, 16).bfloat16())


def test_the_kernels_are_called_as_gpus_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    inner = torch.nn.functional.scaled_mm

    def watch(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        called.append((left.dtype, right.dtype, left.is_contiguous(), right.t().is_contiguous(), *left.shape))
        return inner(left, right, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", watch)
    x, weight = torch.randn(7, 48).bfloat16().requires_grad_(), torch.randn(64, 48).bfloat16().requires_grad_()
    float8_matmul(x, weight).sum().backward()
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert called == [
        (e4m3, e4m3, True, True, 16, 48),
        (e5m2, e4m3, True, True, 16, 64),
        (e5m2, e4m3, True, True, 64, 16),
    ]


@pytest.mark.parametrize(
    "fields", [{}, {"data_parallel": "ddp"}, pytest.param({"compile": True}, marks=pytest.mark.slow)]
)
def test_a_model_trains_in_float8_about_as_in_bfloat16(fields: dict[str, Any]) -> None:
    plain = run_ranks(2, losses, ParallelConfig(**fields, precision=Precision(compute="bfloat16", reduce="float32")))
    found = run_ranks(2, losses, ParallelConfig(**fields, precision=FLOAT8), timeout_s=110)
    assert found[0] == found[1]
    assert found != plain
    assert found[0] == pytest.approx(plain[0], rel=1e-2)
    assert found[0][-1] < found[0][0]


def losses(config: ParallelConfig) -> list[float]:
    """Three steps; the CPU computes the same products, so the check of the device is left out."""
    parallel.compile.BACKEND = "aot_eager"
    with pytest.MonkeyPatch.context() as patch:
        # By its module's name, which a function of the package hides.
        patch.setattr(sys.modules["parallel.parallelize"], "check_float8", lambda *args: None)
        trained = build(config, dtype=torch.float32)
    optimizer = trained.build_optimizer(lambda named: torch.optim.AdamW(list(named.values()), lr=1e-2))
    seen = []
    for _ in range(3):
        seen.append(trained.forward_backward(batches(trained.mesh, 0)).loss)
        optimizer.step()
    return seen


def test_every_linear_map_of_the_blocks_and_nothing_else_is_replaced() -> None:
    config = LlamaConfig(num_layers=2)
    model = Llama(config)
    names = [fqn for fqn, _ in model.named_parameters()]
    apply_float8(model, llama_plan(config).blocks)
    replaced = [fqn for fqn, each in model.named_modules() if "forward" in vars(each)]
    assert replaced == [fqn for fqn, each in model.named_modules() if fqn.endswith("_proj")]
    assert [fqn for fqn, _ in model.named_parameters()] == names


def test_a_cpu_refuses_float8_with_the_reason_before_any_collective() -> None:
    for said in run_ranks(2, refused_on_a_cpu):
        assert "float8=True needs a GPU of compute capability 8.9 or more, this is a CPU; use precision=" in said


def refused_on_a_cpu() -> str:
    with pytest.raises(ValueError) as refusal:
        build(ParallelConfig(precision=FLOAT8))
    return str(refusal.value)


def refusal_on_a_gpu(capability: tuple[int, int], fields: dict[str, Any], model: dict[str, Any], rank: int = 0) -> str:
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config, layout = LlamaConfig(**{"num_layers": 1, **model}), ParallelConfig(**fields, precision=FLOAT8)
    with torch.device("meta"):
        built = Llama(config)
    if rank:
        add_adapters(built, llama_plan(config), LoraConfig(rank=rank))
    try:
        check_float8(built, llama_plan(config).blocks, layout, torch.device("cuda"))
    except ValueError as error:
        return str(error)
    finally:
        patch.undo()
    return ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((9, 0), {}, {}), "^$"),
        (((8, 9), {}, {}), "^$"),
        (((8, 0), {}, {}), "8.9 or more, this is a GPU of 8.0"),
        (((9, 0), {"tp": 2}, {}), "of which a rank of tp=2 sees a part; use tp=1, or"),
        (
            ((9, 0), {}, {"feed_forward_width": 72}),
            r"multiples of 16, which blocks.0.feed_forward.gate_proj \(72, 64\) is not",
        ),
        (((9, 0), {}, {}, 4), "blocks.0.attention.q_proj is a AdaptedLinear"),
    ],
)
def test_a_gpu_refuses_what_its_kernels_do_not_take(arguments: Any, message: str) -> None:
    assert re.search(message, refusal_on_a_gpu(*arguments))


def test_float8_without_bfloat16_is_refused() -> None:
    with pytest.raises(ValueError, match="compute is 'stored'; use compute='bfloat16', or float8=False"):
        Precision(float8=True)
