"""Every private name of torch that the toolkit uses has a test that fails when torch changes it."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
ROWS = "tests/parallel/test_parallelize.py::test_a_layout_that_must_train_takes_steps_like_one_process"
DRY = "tests/recipes/test_ledger.py::test_a_step_without_values_is_the_real_step"
COUNTS = "tests/parallel/test_collectives.py::test_a_step_sends_what_its_layout_says"

# What is used, and the test that would notice.
TESTED = {
    "torch._C._autograd._get_current_graph_task_keep_graph": (
        "tests/models/layers/test_loss.py::test_backward_may_walk_the_graph_twice"
    ),
    "torch._C._current_graph_task_id": (
        "tests/parallel/test_collectives.py::test_every_kind_of_collective_is_counted_with_its_larger_side"
    ),
    "torch._subclasses.fake_tensor.FakeTensor": DRY,
    "torch._subclasses.fake_tensor.FakeTensorMode": DRY,
    "torch._subclasses.fake_tensor.unset_fake_temporarily": DRY,
    "torch._foreach_mul_": (
        "tests/parallel/test_gradients.py::"
        "test_the_norm_over_mixed_meshes_is_that_of_the_full_gradients_and_clipping_reaches_its_bound"
    ),
    "torch._ops.OpOverload": COUNTS,
    "torch.distributed._composable.replicate_with_fsdp.replicate": ROWS,
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": (
        "tests/parallel/test_collectives.py::test_each_collective_has_an_end_and_waits_are_seen"
    ),
    "torch.distributed._functional_collectives.all_to_all_single_autograd": (
        "tests/parallel/test_context_parallel.py::test_a_step_sends_what_the_method_says"
    ),
    "torch.distributed._functional_collectives.wait_tensor": (
        "tests/parallel/test_context_parallel.py::test_no_memory_is_left_behind_by_a_step"
    ),
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": (
        "tests/parallel/test_async_tensor_parallel.py::test_torch_still_has_the_private_names_that_switch_it_on"
    ),
    "torch.distributed.distributed_c10d._resolve_process_group": COUNTS,
    "torch.distributed.fsdp._runtime_utils._reshard": (
        "tests/parallel/test_fsdp1.py::test_an_evaluation_between_gradients_and_step_leaves_no_stale_parameters"
    ),
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime": (
        "tests/parallel/test_schedule_file.py::test_a_schedule_from_a_file_equals_one_process"
    ),
    "torch.distributed.tensor.placement_types._StridedShard": (
        "tests/parallel/test_fsdp1.py::test_a_rank_s_ranges_make_up_the_model_under_the_names_of_its_author"
    ),
    "torch.ops._c10d_functional": ROWS,
    "torch.ops.aten._grouped_mm.default": DRY,
    "torch.ops.profiler._record_function_enter_new.default": (
        "tests/parallel/test_expert_parallel.py::test_a_layer_exchanges_three_times_forward_and_twice_backward"
    ),
    "torch.ops.profiler._record_function_exit._RecordFunction": (
        "tests/parallel/test_expert_parallel.py::test_a_layer_exchanges_three_times_forward_and_twice_backward"
    ),
    "torch.testing._internal.distributed.fake_pg.FakeStore": (
        "tests/recipes/test_ready_recipes.py::test_a_rank_of_the_full_world_holds_its_share_to_the_byte"
    ),
    "torch.utils._mode_utils.no_dispatch": (
        "tests/recipes/test_plan_builds.py::test_gathered_keys_train_under_selective_checkpointing"
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": COUNTS,
    "torch.utils._python_dispatch._disable_current_modes": DRY,
    "torch.utils._triton.has_triton": "tests/test_private_torch_names.py::test_whether_triton_is_there_can_be_asked",
}
ALIASES = {"torch": "torch", "dist": "torch.distributed", "nn": "torch.nn", "F": "torch.nn.functional"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression, with torch's usual aliases written out; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ALIASES.get(node.id, "") if isinstance(node, ast.Name) else ""


def private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{each.name}" for each in node.names)


def used() -> set[str]:
    """The longest private names in the source."""
    sources = [
        path for folder in ("parallel", "models", "checkpoint", "recipes") for path in (ROOT / folder).rglob("*.py")
    ]
    names = {name for path in sources for name in private_names(ast.parse(path.read_text())) if is_private(name)}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def test_each_private_name_that_is_used_is_listed_with_its_test() -> None:
    assert used() == TESTED.keys(), "list a new name in TESTED with the test that fails when torch changes it"


def test_each_listed_test_exists() -> None:
    for where in TESTED.values():
        file, _, function = where.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, where


def test_each_listed_name_exists_in_this_torch() -> None:
    for name in TESTED:
        module, _, attribute = name.rpartition(".")
        owner: object = torch
        for part in module.split(".")[1:]:
            owner = getattr(owner, part, None) or importlib.import_module(module)
        assert hasattr(owner, attribute), name


def test_whether_triton_is_there_can_be_asked() -> None:
    import torch.utils._triton

    assert torch.utils._triton.has_triton() in (True, False)
