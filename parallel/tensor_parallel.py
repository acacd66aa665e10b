"""Splits the modules that a plan names over the `tp` axis."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parallel.expert_styles import ExpertLayer, PartialLinear, SplitExperts, WholeRouter
from parallel.plan import TensorParallelStyle, matching


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """What a head needs to know of the split of its vocabulary, set on it as `tensor_parallel`.

    Attributes:
        group: Process group of the ranks that share the vocabulary.
        rank: This rank's place in it.
        degree: Ranks in it.
        vocab_size: Entries of the whole vocabulary; rank r holds those from r * ceil(vocab_size / degree).
        loss_parallel: Whether the loss works on split logits; False gathers them.
    """

    group: dist.ProcessGroup
    rank: int
    degree: int
    vocab_size: int
    loss_parallel: bool


class VocabularyParallelHead(ParallelStyle):
    """Splits a head's weight along the vocabulary and hands it the whole sequence.

    The head's gradient with respect to its input is a partial sum over the vocabulary; the layout of the
    input decides how the ranks add it up (reduce-scatter under sequence parallel, all-reduce else).
    """

    def __init__(self, residual: Placement, loss_parallel: bool) -> None:
        """Keeps the layout in which activations arrive.

        Args:
            residual: Placement of the activations between modules.
            loss_parallel: Whether the loss works on split logits.
        """
        super().__init__()
        self.residual, self.loss_parallel = residual, loss_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = module.get_parameter("weight")
        split = distribute_tensor(weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(split, requires_grad=weight.requires_grad))
        module.tensor_parallel = HeadSplit(  # type: ignore[assignment]  # nn.Module's setattr takes any value
            group=device_mesh.get_group(),
            rank=device_mesh.get_local_rank(),
            degree=device_mesh.size(),
            vocab_size=weight.shape[0],
            loss_parallel=self.loss_parallel,
        )

        def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = DTensor.from_local(inputs[0], device_mesh, [self.residual], run_check=False)
            whole = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            return (whole, *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


class WeightOnly(ParallelStyle):
    """Lays a module's own parameters out; the module around it sees to inputs and outputs.

    Args:
        dim: Which dim of a matrix is split; None: every rank holds all of it, and gradients of parts are summed.
    """

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.placement: Placement = Replicate() if dim is None else Shard(dim)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            laid_out = distribute_tensor(parameter, device_mesh, [self.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(laid_out, requires_grad=parameter.requires_grad))
        return module


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: Mapping[str, TensorParallelStyle],
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    """Splits a model in place over the ranks of a 1-D mesh.

    Args:
        model: The whole model; parameters may be on meta.
        mesh: The `tp` view.
        styles: Style of each module, by fqn pattern.
        sequence_parallel: Split activations between modules along the sequence.
        loss_parallel: Keep logits split along the vocabulary in the loss.
    """
    residual: Placement = Shard(1) if sequence_parallel else Replicate()
    makers: dict[TensorParallelStyle, Callable[[], Any]] = {
        "embedding": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        # One gather serves all projections that read the same input; they see a DTensor.
        "gather_input": lambda: PrepareModuleInput(
            input_layouts=(residual,), desired_input_layouts=(Replicate(),), use_local_output=False
        ),
        "colwise": ColwiseParallel,
        "rowwise": lambda: RowwiseParallel(output_layouts=residual),
        # Without sequence parallel every rank normalises the same activations, so a plain module is right.
        "norm": lambda: SequenceParallel(use_local_output=True) if sequence_parallel else None,
        # Its weight is shared by heads that different ranks hold: as a DTensor split along heads, the
        # gradient is known to be a partial sum.
        "head_norm": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
        "head": lambda: VocabularyParallelHead(residual, loss_parallel),
        "expert_layer": lambda: ExpertLayer(residual),
        "router": WholeRouter,
        "experts": SplitExperts,
        "partial_colwise": lambda: PartialLinear(0),
        "partial_rowwise": lambda: PartialLinear(1),
        "partial_replicate": lambda: PartialLinear(None),
        "weight_replicate": lambda: WeightOnly(None),
        "weight_colwise": lambda: WeightOnly(0),
        "weight_rowwise": lambda: WeightOnly(1),
    }
    modules = dict(model.named_modules())
    frozen = [fqn for fqn, parameter in model.named_parameters() if not parameter.requires_grad]
    for pattern, style in styles.items():
        for fqn in matching(pattern, modules):
            parallel_style = makers[style]()
            if parallel_style is not None:
                _parallelize(modules[fqn], mesh, parallel_style)
            if style == "embedding":
                # Else blocks would start from a view of a collective's result, which fully_shard warns of.
                modules[fqn].register_forward_hook(_copy_output)
    for fqn in frozen:
        # Some of torch's styles make every parameter trainable.
        model.get_parameter(fqn).requires_grad_(False)


def _parallelize(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Applies a style to a module alone: torch's for linear maps would split what lies within one in the same way."""
    within = dict(module.named_children()) if isinstance(module, nn.Linear) else {}
    for name in within:
        delattr(module, name)
    parallelize_module(module, mesh, style)
    for name, child in within.items():
        setattr(module, name, child)


def check_styles(model: nn.Module, styles: Mapping[str, TensorParallelStyle]) -> None:
    """Refuses modules without a style where ranks see different parts of the sequence.

    Such a module would compute, but its gradients would be those of the rank's own tokens, and nothing would add them.

    Args:
        model: The whole model.
        styles: Style of each module, by fqn pattern.

    Raises:
        ValueError: If a trainable parameter lies in a module without a style.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    with_style = {fqn for pattern in styles for fqn in matching(pattern, modules)}
    parameters = [fqn for fqn, parameter in model.named_parameters() if parameter.requires_grad]
    left = [fqn for fqn in parameters if fqn.rpartition(".")[0] not in with_style]
    if left:
        raise ValueError(
            f"sequence_parallel splits the sequence, but the plan has no tensor-parallel style for the modules of "
            f"{len(left)} parameters ({', '.join(left[:3])} ...), whose gradients nobody would add; set "
            "sequence_parallel=False, with which every rank computes them whole, or give them a style"
        )


def _copy_output(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output.clone()


def tie(model: nn.Module, tied: tuple[tuple[str, ...], ...]) -> None:
    """Makes each group of names one parameter again: the one under the first name, or the first that is split.

    `parallelize_module` and `to_empty` make a parameter anew under each name that holds it, so tied ones
    come apart in silence.

    Args:
        model: The whole model.
        tied: Groups of parameter fqns.
    """
    for names in tied:
        parameters = [model.get_parameter(name) for name in names]
        parameter = next((each for each in parameters if isinstance(each, DTensor)), parameters[0])
        for name in names:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)
