"""Trains a small model twice, under the units made by hand and under `fully_shard`, and records the life of a unit."""

import copy
import itertools
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import Batch, Mesh, ParallelConfig, Trained, Unit, build_mesh, parallelize
from recipes.sharding_by_hand.unit import ShardedUnit

MODEL = LlamaConfig(num_layers=2)
UNITS = tuple(Unit(modules=modules) for modules in (("embed",), ("blocks.0",), ("blocks.1",), ("norm", "head")))
ROWS, LENGTH = 2, 32


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a rank holds once something has happened to a unit.

    Attributes:
        unit: Name of the unit.
        what: What happened.
        sent_bytes: What this rank sent for it, around a ring.
        whole_bytes: Gathered parameters, of all units.
        gradient_bytes: Gradients that are not reduced yet, of all units.
        shard_bytes: This rank's rows of parameters and reduced gradients, of all units.
    """

    unit: str
    what: str
    sent_bytes: int
    whole_bytes: int
    gradient_bytes: int
    shard_bytes: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both runs, as rank 0 saw them.

    Attributes:
        by_hand: Loss of each step under `ShardedUnit`.
        fully_shard: The same under `fully_shard`.
        life: What happened to the units until the end of the first step.
    """

    by_hand: list[float]
    fully_shard: list[float]
    life: list[Moment]

    @property
    def difference(self) -> float:
        """Largest difference of a loss, as a share of it."""
        pairs = zip(self.by_hand, self.fully_shard, strict=True)
        return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def compare(num_steps: int) -> Comparison:
    """Trains with both; every rank of the job calls this.

    Args:
        num_steps: Steps of AdamW.
    """
    mesh = build_mesh(ParallelConfig())
    torch.manual_seed(0)
    model = Llama(MODEL).double().to(mesh.device)
    plan = replace(llama_plan(MODEL), units=UNITS)
    trained = parallelize(copy.deepcopy(model), mesh, mesh.config, plan)
    by_hand, life = train_by_hand(model, mesh, num_steps)
    return Comparison(by_hand=by_hand, fully_shard=_train(trained, num_steps), life=life)


def train_by_hand(model: Llama, mesh: Mesh, num_steps: int) -> tuple[list[float], list[Moment]]:
    """Shards a model by hand and trains it.

    Args:
        model: With the same values on every rank.
        mesh: Over whose fsdp view it is sharded.
        num_steps: Steps of AdamW.

    Returns:
        The loss of each step, and what happened to the units until the end of the first.
    """
    units: list[ShardedUnit] = []
    life: list[Moment] = []
    losses: list[float] = []

    def log(unit: str, what: str, sent_bytes: int) -> None:
        if not losses:
            life.append(_moment(units, unit, what, sent_bytes))

    for unit in UNITS:
        modules = [model.get_submodule(fqn) for fqn in unit.modules]
        units.append(ShardedUnit(" + ".join(unit.modules), modules, mesh.group("fsdp"), log))
        log(units[-1].name, "shard", 0)
    for before, after in itertools.pairwise(units):
        before.next_in["forward"], after.next_in["backward"] = after, before
    optimizer = torch.optim.AdamW([unit.shard_C for unit in units], lr=1e-3)
    for step in range(num_steps):
        batch = _batch(mesh, step)
        optimizer.zero_grad()
        # Each rank's part of the mean over the tokens of all, so that gradients need only be summed.
        loss = model(batch.tokens, labels=batch.labels) / (batch.labels.numel() * mesh.size)
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=mesh.group("loss"))
        losses.append(total.item())
    return losses, life


def _train(trained: Trained, num_steps: int) -> list[float]:
    optimizer = trained.build_optimizer(lambda named: torch.optim.AdamW(named.values(), lr=1e-3))
    losses = []
    for step in range(num_steps):
        losses.append(trained.forward_backward([_batch(trained.mesh, step)]).loss)
        optimizer.step()
    return losses


def _batch(mesh: Mesh, step: int) -> Batch:
    """This rank's rows of a step."""
    generator = torch.Generator().manual_seed(step * mesh.size + mesh.coordinate("dp"))
    tokens = torch.randint(MODEL.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    return Batch.from_tokens(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).to(mesh.device)


def _moment(units: list[ShardedUnit], unit: str, what: str, sent_bytes: int) -> Moment:
    """What this rank holds now, from the live tensors."""
    gradients = [parameter.grad for each in units for parameter in each.parameters]
    shards: list[nn.Parameter] = [each.shard_C for each in units]
    return Moment(
        unit=unit,
        what=what,
        sent_bytes=sent_bytes,
        whole_bytes=sum(each.whole_NC.untyped_storage().nbytes() for each in units),
        gradient_bytes=sum(gradient.nbytes for gradient in gradients if gradient is not None),
        shard_bytes=sum(each.nbytes + (each.nbytes if each.grad is not None else 0) for each in shards),
    )
