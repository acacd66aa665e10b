"""The gradient norm counts each element once, and clipping scales all gradients alike, on any mix of meshes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from models.llama import LlamaConfig
from parallel import Mesh, ParallelConfig, build_mesh
from parallel.gradients import clip_gradients, sharded_views
from tests.parallel.small_model import batches, build, difference, whole
from tests.ranks import run_ranks

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)

# Shape, view of the mesh and placements; no mesh for a plain tensor. Rows of 1 and 3 leave empty and uneven shards.
KINDS: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[Placement, ...]]] = {
    "plain": ((5,), (), ()),
    "sharded over fsdp": ((6, 2), ("fsdp",), (Shard(0),)),
    "with an empty shard": ((1, 3), ("fsdp",), (Shard(0),)),
    "sharded over tp, unevenly": ((2, 3), ("tp",), (Shard(1),)),
    "replicated over tp": ((4,), ("tp",), (Replicate(),)),
    "sharded over both": ((4, 6), ("fsdp", "tp"), (Shard(0), Shard(1))),
    "sharded over fsdp, replicated over tp": ((7,), ("fsdp", "tp"), (Shard(0), Replicate())),
}


def full_gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, (shape, _, _) in KINDS.items()}


def mixed_parameters(mesh: Mesh) -> dict[str, nn.Parameter]:
    """A parameter of each kind, its gradient set."""
    named = {}
    for name, gradient in full_gradients().items():
        _, dims, placements = KINDS[name]
        if dims:
            gradient = distribute_tensor(gradient, mesh.parameters[dims], placements)
        named[name] = nn.Parameter(torch.zeros_like(gradient))
        named[name].grad = gradient
    # Ranks hold summands of this one, which adds up to twice a row of ones and shows once it is reduced.
    summand = DTensor.from_local(torch.ones(3, dtype=torch.float64), mesh["tp"], [Partial()])
    named["partial"] = nn.Parameter(distribute_tensor(torch.zeros(3, dtype=torch.float64), mesh["tp"], [Replicate()]))
    named["partial"].grad = summand
    return named


def clipped(max_norm: float | None, norm_type: float) -> tuple[float, float, dict[str, Tensor]]:
    """Norms before and after clipping, and the gradients then, on a mesh of 2 x 2."""
    mesh = build_mesh(ParallelConfig(tp=2))
    named = mixed_parameters(mesh)
    before = clip_gradients(named.values(), mesh, max_norm, norm_type)
    after = clip_gradients(named.values(), mesh, None, norm_type)
    assert before.dtype == torch.float64 and before.dim() == 0
    return (
        before.item(),
        after.item(),
        {name: whole(each.grad) for name, each in named.items() if each.grad is not None},
    )


def every_clip() -> list[tuple[float, float, dict[str, Tensor]]]:
    return [clipped(max_norm, norm_type) for norm_type in NORM_TYPES for max_norm in (0.5, 1e6, None)]


def test_the_norm_over_mixed_meshes_is_that_of_the_full_gradients_and_clipping_reaches_its_bound() -> None:
    results = run_ranks(4, every_clip)
    gradients = full_gradients() | {"partial": torch.full((3,), 2.0, dtype=torch.float64)}
    elements = torch.cat([each.flatten() for each in gradients.values()])
    cases = [(norm_type, max_norm) for norm_type in NORM_TYPES for max_norm in (0.5, 1e6, None)]
    for index, (norm_type, max_norm) in enumerate(cases):
        reference = torch.linalg.vector_norm(elements, norm_type).item()
        expected = min(reference, max_norm or math.inf)
        for before, after, scaled in (each[index] for each in results):
            assert before == pytest.approx(reference, rel=1e-13), norm_type
            # The usual 1e-6 in the denominator keeps the norm a little below its bound.
            assert after == pytest.approx(expected, rel=1e-5 if expected == 0.5 else 1e-13), (norm_type, max_norm)
            for name, gradient in gradients.items():
                torch.testing.assert_close(scaled[name], gradient * (after / before), rtol=1e-12, atol=0)


def test_high_norms_of_tiny_and_of_huge_gradients_neither_vanish_nor_overflow() -> None:
    elements = torch.cat([*(each.flatten() for each in full_gradients().values()), torch.full((3,), 2.0)]).abs()
    largest = elements.max().item()
    shares = elements / largest
    for found in run_ranks(4, norms_of_scaled_gradients):
        for (scale, norm_type), (before, after) in found.items():
            norm = scale * largest * (shares**norm_type).sum().item() ** (1 / norm_type)
            assert before == pytest.approx(norm, rel=1e-6)
            # The bound is half the norm, less the usual 1e-6 where that is not small beside it.
            assert after == pytest.approx(before / 2 / (1 + 1e-6 / before), rel=1e-5), (scale, norm_type)


def norms_of_scaled_gradients() -> dict[tuple[float, float], tuple[float, float]]:
    """Norms before and after clipping to half of them, of float32 gradients on a mesh of 2 x 2."""
    mesh, norms = build_mesh(ParallelConfig(tp=2)), {}
    for scale in (1e-12, 1.0, 1e12):
        for norm_type in (3.0, 64.0, 1000.0):
            named = mixed_parameters(mesh)
            for each in named.values():
                each.data = each.data.float()
                gradient = each.grad
                assert gradient is not None
                each.grad = None
                each.grad = gradient.float() * scale
            before = clip_gradients(named.values(), mesh, None, norm_type).item()
            clip_gradients(named.values(), mesh, before / 2, norm_type)
            norms[scale, norm_type] = before, clip_gradients(named.values(), mesh, None, norm_type).item()
    return norms


def norms_of_layout(fields: dict[str, Any]) -> list[float]:
    # A norm of 2 components leaves an empty shard on 3 and 4 ranks.
    model = LlamaConfig(num_layers=1, head_dim=2, qk_norm=True, vocab_size=259)
    trained = build(ParallelConfig(**fields), model)
    trained.forward_backward(batches(trained.mesh, 0))
    return [trained.clip_gradients(None, norm_type).item() for norm_type in NORM_TYPES]


def norms_of_layouts(layouts: list[dict[str, Any]]) -> list[list[float]]:
    return [norms_of_layout(fields) for fields in layouts]


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{"data_parallel": "none"}],
    2: [{}, {"tp": 2, "sequence_parallel": False}],
    3: [{}],
    4: [{}, {"tp": 2}, {"tp": 4}, {"strategy": "hybrid_shard", "dp_replicate": 2}],
}


def test_every_layout_reports_the_norms_of_one_process_on_every_rank() -> None:
    (((reference,),), *others) = [run_ranks(size, norms_of_layouts, layouts) for size, layouts in LAYOUTS.items()]
    for results in others:
        assert all(each == results[0] for each in results)
        for norms in results[0]:
            assert difference(norms, reference) < 1e-12


def test_gradients_that_are_not_finite_give_such_a_norm_on_every_rank() -> None:
    for norms in run_ranks(4, norms_with_a_bad_element):
        assert len(norms) == 2 * len(NORM_TYPES) and not any(map(math.isfinite, norms))


def norms_with_a_bad_element() -> list[float]:
    """Norms when one element, which one rank alone holds, is not finite."""
    mesh, norms = build_mesh(ParallelConfig(tp=2)), []
    for bad in (math.nan, math.inf):
        named = mixed_parameters(mesh)
        gradient = named["sharded over both"].grad
        assert isinstance(gradient, DTensor)
        if torch.distributed.get_rank() == 1:
            gradient.to_local()[0, 0] = bad
        norms += [clip_gradients(named.values(), mesh, None, norm_type).item() for norm_type in NORM_TYPES]
    return norms


def test_without_gradients_the_norm_is_zero() -> None:
    assert run_ranks(2, norm_without_gradients) == [0.0, 0.0]


def norm_without_gradients() -> float:
    trained = build(ParallelConfig(), LlamaConfig(num_layers=1))
    return trained.clip_gradients(1.0).item()


def test_clipping_keeps_the_dtype_of_gradients() -> None:
    assert run_ranks(1, dtypes_after_clipping)[0] == [torch.float32, torch.bfloat16]


def dtypes_after_clipping() -> list[torch.dtype]:
    mesh = build_mesh(ParallelConfig(data_parallel="none"))
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    for each in parameters:
        each.grad = torch.full_like(each, 3.0)
    norm = clip_gradients(parameters, mesh, 1.0)
    # Norms of bfloat16 gradients are bfloat16.
    assert norm.item() == pytest.approx(54**0.5, rel=2**-8)
    assert all(each.grad is not None and each.grad.float().norm().item() < 0.72 for each in parameters)
    return [each.grad.dtype for each in parameters if each.grad is not None]


def test_a_norm_type_or_bound_that_is_not_positive_is_refused() -> None:
    messages = run_ranks(1, refusals)[0]
    assert all("must be positive" in each for each in messages) and len(messages) == 4


def refusals() -> list[str]:
    mesh, messages = build_mesh(ParallelConfig(data_parallel="none")), []
    for max_norm, norm_type in ((0.0, 2.0), (-1.0, 2.0), (math.nan, 2.0), (1.0, 0.0)):
        with pytest.raises(ValueError) as caught:
            clip_gradients([], mesh, max_norm, norm_type)
        messages.append(str(caught.value))
    return messages


def test_a_gradient_sharded_along_another_view_is_refused_instead_of_left_out() -> None:
    assert all("sharded along [['dp_replicate']]" in each for each in run_ranks(2, refusal_of_another_view))


def refusal_of_another_view() -> str:
    mesh = build_mesh(ParallelConfig(strategy="hybrid_shard", dp_replicate=2))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh["dp_replicate"], [Shard(0)]))
    parameter.grad = torch.ones_like(parameter)
    assert sharded_views(parameter) == {"dp_replicate"}
    with pytest.raises(ValueError) as caught:
        clip_gradients([parameter], mesh, None)
    return str(caught.value)
