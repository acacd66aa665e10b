"""Runs a model that is cut into stages along the `pp` axis."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime, get_schedule_class

from parallel.backend import Backend
from parallel.batch import Batch
from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.plan import ParallelPlan
from parallel.schedules import check_micro_batches, traits_of
from parallel.stages import Stage, cut, part_of_plan, stage_module
from parallel.tied_stages import TiedStages

# B batch, S this rank's tokens, D model, V vocabulary


class Pipeline(nn.Module):
    """This rank's stages, and the way of a micro-batch through those of all ranks.

    Units of a stage are gathered when a step first needs them and freed at its end, whatever the strategy: freed after
    each forward they would be gathered anew for every micro-batch. Gradients are summed over data-parallel ranks once a
    step.

    Attributes:
        stages: This rank's stages by their number, as the backend has wrapped them.
    """

    def __init__(
        self, source: nn.Module, mesh: Mesh, config: ParallelConfig, plan: ParallelPlan, backend: Backend
    ) -> None:
        """Wraps each stage by itself.

        Args:
            source: This rank's part of the model.
            mesh: The mesh.
            config: The layout with every degree resolved.
            plan: That of the whole model.
            backend: The data-parallel backend.
        """
        super().__init__()
        self._mesh, self._config, self._plan = mesh, config, plan
        self._cut = cut(plan, config)
        self._rank, self._group = mesh.coordinate("pp"), mesh.group("pp")
        own = [stage for stage in self._cut if stage.rank == self._rank]
        stored = next(each.dtype for each in source.parameters() if each.is_floating_point())
        self._dtype = config.precision.compute_dtype or stored
        parts = {each: source if len(own) == 1 else stage_module(source, plan, each) for each in own}
        self._tied = TiedStages(parts, self._cut, plan, self._group)
        wrapped = {
            str(stage.index): backend.wrap(part, mesh, config, part_of_plan(plan, stage.modules))
            for stage, part in parts.items()
        }
        self.stages = nn.ModuleDict(wrapped)
        # Where a stage raises, it logs all that all stages had to do, from which the exception would have to be picked.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
        self._prepared: tuple[Any, Any] | None = None
        self._losses: list[Tensor] = []
        self._divisor = 1.0

    @property
    def held_twice(self) -> Sequence[nn.Parameter]:
        """Parameters of this rank of which another one, or another stage, has a copy that counts."""
        return self._tied.copies

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """What the whole model returns, on every rank of the pipeline; without gradients.

        Args:
            tokens: Token ids, int64 [B, S].
            positions: Position of each token within its document, int64 [B, S].
            document_ids: Document of each token of whole sequences. None: each row is one document.
            labels: Token to be predicted at each position, int64 [B, S]; None asks for logits.
        """
        self._tied.refresh()
        given: tuple[Tensor, ...] = (tokens,)
        for stage in self._cut:
            if stage.rank == self._rank:
                module = self.stages[str(stage.index)]
                output = module(*given, positions=positions, document_ids=document_ids, labels=labels)
                given = output if isinstance(output, tuple) else (output,)
            if stage is not self._cut[-1]:
                metas = self._between(stage, tokens.shape, with_loss=labels is not None)
                given = self._hand_on(given, metas, stage.rank, self._cut[stage.index + 1].rank)
        if self._rank != self._cut[-1].rank:
            shape = () if labels is not None else (*tokens.shape, self._plan.shape.vocab_size)
            dtype = self._loss_dtype if labels is not None else self._dtype
            given = (torch.empty(shape, dtype=dtype, device=tokens.device),)
        result = given[0].contiguous()
        dist.broadcast(result, group_src=self._cut[-1].rank, group=self._group)
        return result

    def check_step(self, micro_batches: Sequence[Batch]) -> None:
        """Holds the micro-batches of a step against the schedule.

        Raises:
            ValueError: If it cannot run so many, or they are not alike.
        """
        check_micro_batches(self._config, len(micro_batches))
        kinds = {(tuple(each.tokens.shape), each.document_ids is None) for each in micro_batches}
        if len(kinds) > 1:
            raise ValueError(
                f"a pipeline's micro-batches must have one shape, and document ids all or none; got {sorted(kinds)} "
                "(shape, no document ids): pad the short ones with rows whose labels are all ignored"
            )

    def forward_backward(
        self, micro_batches: Sequence[tuple[Tensor, Tensor, Tensor, Tensor | None]], divisor: float
    ) -> Tensor:
        """Computes the gradients of a step by the schedule.

        Args:
            micro_batches: Tokens, positions, labels and document ids of each, as the model on this rank takes them; of
                one shape.
            divisor: What losses are divided by: valid tokens of the global batch, over a scale of the loss if any.

        Returns:
            Summed loss of each micro-batch, on every rank of the pipeline.
        """
        self._tied.refresh()
        count = len(micro_batches)
        schedule = self._schedule(count, micro_batches[0][0].shape)
        self._losses, self._divisor = [], divisor
        # Torch's schedules take the step in one piece and cut it again.
        tokens, positions, labels, documents = (
            None if each[0] is None else torch.cat(each) for each in zip(*micro_batches, strict=True)
        )
        given = {"positions": positions, "document_ids": documents, "labels": labels}
        try:
            schedule.step(tokens, target=labels, losses=[], return_outputs=False, **given)
        except RuntimeError as error:
            # Torch wraps what a stage raises in a description of its inputs.
            raise (error.__cause__ or error) from None
        self._tied.sum_gradients()
        losses = torch.zeros(count, dtype=self._loss_dtype, device=self._mesh.device)
        if self._losses:
            losses = torch.stack(self._losses)
        dist.broadcast(losses, group_src=self._cut[-1].rank, group=self._group)
        return losses

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self._dtype, torch.float32)

    def _scaled(self, loss: Tensor, _labels: Tensor) -> Tensor:
        """What the last stage goes backward from."""
        self._losses.append(loss.detach())
        return loss / self._divisor

    def _schedule(self, num_micro_batches: int, shape: torch.Size) -> Any:
        """The schedule for micro-batches of a shape, made when the shape or their number is another than before."""
        key = (num_micro_batches, shape)
        if self._prepared is None or self._prepared[0] != key:
            name = traits_of(self._config).torch_name
            # Private: what runs all of torch's schedules with several stages a rank; no public way takes a table.
            kind = get_schedule_class(name) if name else _PipelineScheduleRuntime
            stages = [self._stage(stage, shape) for stage in self._cut if stage.rank == self._rank]
            what = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            # The loss is divided by the global count already, so that micro-batches add up.
            made = kind(what, num_micro_batches, loss_fn=self._scaled, scale_grads=False)
            if name is None:
                made._load_csv(self._config.schedule_file or "")
            self._prepared = (key, made)
        return self._prepared[1]

    def _stage(self, stage: Stage, shape: torch.Size) -> PipelineStage:
        """A stage for torch, told what it takes and gives: to find out it would run the model once more."""
        last = stage.index == len(self._cut) - 1
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=self._loss_dtype, device="meta", requires_grad=True)
        before = (tokens,) if stage.index == 0 else self._between(self._cut[stage.index - 1], shape, with_loss=True)
        return PipelineStage(
            self.stages[str(stage.index)],
            stage.index,
            len(self._cut),
            self._mesh.device,
            input_args=before,
            output_args=(loss,) if last else self._between(stage, shape, with_loss=True),
            group=self._group,
        )

    def _between(self, stage: Stage, shape: torch.Size, *, with_loss: bool) -> tuple[Tensor, ...]:
        """What a stage hands on to the next, on meta: a residual stream, and beside it a loss of its blocks if any."""
        split = self._config.tp if self._config.sequence_parallel else 1
        hidden = (shape[0], shape[1] // split, self._plan.shape.width)
        metas = [torch.empty(hidden, dtype=self._dtype, device="meta", requires_grad=True)]
        so_far = {fqn for each in self._cut[: stage.index + 1] for fqn in each.modules}
        if with_loss and any(block.adds_loss for block in self._plan.blocks if block.fqn in so_far):
            metas.append(torch.empty((), dtype=self._loss_dtype, device="meta", requires_grad=True))
        return tuple(metas)

    def _hand_on(
        self, given: tuple[Tensor, ...], metas: tuple[Tensor, ...], source: int, target: int
    ) -> tuple[Tensor, ...]:
        """Brings what one stage gave to the rank of the next."""
        if source == target:
            return given
        if source == self._rank:
            for each in given:
                dist.send(each.contiguous(), group_dst=target, group=self._group)
        elif target == self._rank:
            given = tuple(torch.empty_like(meta, device=self._mesh.device, requires_grad=False) for meta in metas)
            for each in given:
                dist.recv(each, group_src=source, group=self._group)
        return given
