"""The object that training, evaluation and checkpoints use, whatever backend is beneath."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel import experts, gradients, step
from parallel.backend import Backend, OptimizerFactory
from parallel.batch import IGNORE_INDEX, Batch
from parallel.config import ParallelConfig
from parallel.layout import check_sequence_length, sequence_multiple
from parallel.loss_scale import LossScale
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan
from parallel.sequence_cut import SequenceCut

if TYPE_CHECKING:
    from parallel.pipeline_parallel import Pipeline


class Trained:
    """A model laid out on a mesh.

    Attributes:
        model: What to call; the backend may have wrapped it.
        source: The model as its author wrote it, whose fqns name everything; with pp what this rank has of it.
        mesh: The mesh.
        config: The layout with every degree resolved.
        plan: What the model declared.
        backend: The data-parallel backend.
        pipeline: The same as `model` where that is a pipeline.
        cut: Which part of each sequence the model is given on this rank.
        loss_scale: Scale of the loss, which training follows and a checkpoint has to hold; None: it is not scaled.
        expert_load: Load of the experts in the last step, which the optimizer's step is to answer, int64 [L, E].
    """

    pipeline: "Pipeline | None" = None
    expert_load: Tensor | None = None

    def __init__(
        self, source: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan, backend: Backend
    ) -> None:
        """Wraps the model where it has values already or the backend takes it on meta.

        Args:
            source: The model, already split by tensor parallelism.
            mesh: The mesh.
            config: The layout with every degree resolved.
            plan: What the model declares.
            backend: The data-parallel backend.
        """
        self.source, self.mesh, self.config, self.plan, self.backend = source, mesh, config, plan, backend
        self.cut = SequenceCut(
            degree=mesh.degree("cp"), rank=mesh.coordinate("cp"), balanced=config.cp_method == "ring"
        )
        precision = config.precision
        self.loss_scale = LossScale(precision.loss_scaling) if precision.compute == "float16" else None
        self.model, self._wrapped = source, False
        has_values = not any(parameter.is_meta for parameter in source.parameters())
        if backend.wraps_before_materialize or has_values:
            self._wrap()

    @property
    def parameter_device(self) -> torch.device:
        """Where parameters are stored: the mesh's device, or host memory under CPU offload."""
        return torch.device("cpu") if self.config.sharding.cpu_offload else self.mesh.device

    @property
    def parts(self) -> list[nn.Module]:
        """What this rank calls: the model, or its stages of a pipeline."""
        return [self.source] if self.pipeline is None else [*self.pipeline.stages.values()]

    def wrap_after_materialize(self) -> None:
        """Wraps the model where the backend needs real values; `materialize` calls this."""
        if not self._wrapped:
            self._wrap()

    def _wrap(self) -> None:
        parts = (self.source, self.mesh, self.config, self.plan)
        if self.config.pp > 1:
            # Not at the top: only stages need torch's schedules.
            from parallel.pipeline_parallel import Pipeline

            self.model = self.pipeline = Pipeline(*parts, self.backend)
        else:
            self.model = self.backend.wrap(*parts)
        self._wrapped = True

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The sharded parameters by fqn; tied ones once, under their canonical name."""
        self.backend.reshard(self.model)
        canonical = {name: names[0] for names in self.plan.tied for name in names}
        named: dict[str, nn.Parameter] = {}
        # The last stage of a pipeline may have a tied parameter without its first name.
        for fqn, parameter in self.source.named_parameters(remove_duplicate=False):
            named.setdefault(canonical.get(fqn, fqn), parameter)
        return named

    def forward_backward(self, micro_batches: Sequence[Batch]) -> "step.StepResult":
        """Computes the gradients of one step, starting from none.

        The loss is the mean over the valid tokens of the global batch: of all micro-batches on all ranks.

        Args:
            micro_batches: This rank's part, as many on every rank.

        Returns:
            Summed loss and token count of the global batch, equal on every rank.

        Raises:
            ValueError: On every rank, if any rank's batches do not fit the layout.
        """
        return step.forward_backward(self, micro_batches)

    def evaluate(self, micro_batches: Sequence[Batch]) -> "step.StepResult":
        """Computes the loss alone; arguments, result and errors are those of `forward_backward`."""
        return step.evaluate(self, micro_batches)

    def clip_gradients(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`.

        Args:
            max_norm: The largest norm allowed; None only measures.
            norm_type: p of the norm, positive or infinity.

        Returns:
            The norm before clipping, a float64 scalar, equal on every rank.
        """
        parameters = self.named_parameters().values()
        copies = () if self.pipeline is None else self.pipeline.held_twice
        return gradients.clip_gradients(parameters, self.mesh, max_norm, norm_type, self.backend.sharded_views, copies)

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Builds an optimizer over the parameters as they are sharded, whose step works on local shards.

        It must treat each element by itself, as SGD and the Adam family do.

        Args:
            factory: Makes it from the parameters by fqn, for example
                `lambda named: torch.optim.AdamW(named.values(), lr=3e-4)`.

        Returns:
            What the factory made.

        Raises:
            ValueError: If it misses a trainable parameter or holds a foreign one, or parameters have no values yet.
        """
        trainable = {fqn: each for fqn, each in self.named_parameters().items() if each.requires_grad}
        on_meta = [fqn for fqn, each in trainable.items() if each.is_meta]
        if on_meta:
            raise ValueError(
                f"{len(on_meta)} parameters are still on meta ({', '.join(on_meta[:3])} ...) and will be replaced; "
                "call materialize before the optimizer is built"
            )
        narrow = [fqn for fqn, each in trainable.items() if each.dtype == torch.bfloat16]
        if narrow:
            warnings.warn(
                f"{len(narrow)} parameters are stored in bfloat16 ({', '.join(narrow[:3])} ...): "
                "updates smaller than their rounding are lost and optimizer state is as coarse; store float32 and set "
                "precision=Precision(compute='bfloat16', reduce='float32')",
                stacklevel=2,
            )
        optimizer = self.backend.build_optimizer(factory, trainable)
        self.check_optimizer(optimizer)
        self.backend.prepare_optimizer(optimizer, self.mesh)
        optimizer.register_step_post_hook(lambda *_: experts.balance(self))
        return optimizer

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Makes sure that an optimizer updates this model's parameters, all of them.

        One built before `parallelize`, or from the unsharded parameters that an unfinished forward leaves,
        would update nothing, without an error.

        Args:
            optimizer: The optimizer.

        Raises:
            ValueError: If it misses a trainable parameter or holds a foreign one.
        """
        named = self.named_parameters()
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [fqn for fqn, each in named.items() if each.requires_grad and id(each) not in held]
        num_foreign = len(held - {id(each) for each in named.values()})
        if missing or num_foreign:
            raise ValueError(
                f"the optimizer misses {len(missing)} trainable parameters ({', '.join(missing[:3])} ...) and holds "
                f"{num_foreign} that are not this model's; build it after parallelize, through trained.build_optimizer"
            )

    @torch.no_grad()
    def logits(self, tokens: Tensor, *, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Logits of the whole vocabulary, the same on every rank that was given the same tokens.

        Every rank calls this together. Sequences are padded on the right where their parts would not be as long.

        Args:
            tokens: Token ids, int64 [B, S].
            positions: Position of each token in its document, int64 [B, S]; None counts from 0.
            document_ids: Document of each token, int64 [B, S]; None: each row is one document.

        Returns:
            Logits [B, S, V].
        """
        length = tokens.shape[1]
        missing = -length % sequence_multiple(self.config)
        check_sequence_length(self.config, length + missing, self.plan.shape)
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        # Of documents every rank needs those of the whole sequence, which its tokens look back on.
        documents = None if document_ids is None else _pad(document_ids, missing)
        tokens, positions = (self.cut.part(_pad(each, missing)) for each in (tokens, positions))
        output = self.model(tokens, positions=positions, document_ids=documents)
        own = output.full_tensor() if isinstance(output, DTensor) else output
        whole = self.cut.join(_gathered(own, self.mesh))
        return whole[:, :length].to(self.config.precision.output_dtype or whole.dtype)

    def check_batch(self, batch: Batch) -> None:
        """Holds one batch against the layout.

        Raises:
            ValueError: If its sequence length does not divide or a token is outside the vocabulary.
        """
        check_sequence_length(self.config, batch.tokens.shape[1], self.plan.shape)
        vocab_size = self.plan.shape.vocab_size
        labels = batch.labels.where(batch.labels != IGNORE_INDEX, 0)
        for name, ids in (("tokens", batch.tokens), ("labels", labels)):
            # Split vocabularies would take a foreign token for another rank's, on every rank.
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            if outside.numel():
                raise ValueError(
                    f"a batch's {name} hold {outside[0].item()}, but the vocabulary has {vocab_size} entries; use a "
                    f"tokenizer whose ids are below {vocab_size}, or raise the model's vocab_size"
                )


def _pad(ids: Tensor, amount: int) -> Tensor:
    return nn.functional.pad(ids, (0, amount)) if amount else ids


def _gathered(own: Tensor, mesh: Mesh) -> list[Tensor]:
    """What each of the ranks that share a sequence holds, in their order."""
    if mesh.degree("cp") == 1:
        return [own]
    parts = [torch.empty_like(own) for _ in range(mesh.degree("cp"))]
    dist.all_gather(parts, own.contiguous(), group=mesh.group("cp"))
    return parts
