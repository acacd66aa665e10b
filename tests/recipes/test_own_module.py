"""A module of transformers, unmodified, trains under full_shard x tp as on one process."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from parallel import ParallelConfig, build_mesh, parallelize
from parallel.replicas import local_part
from recipes.own_module import LAYOUT, OwnModule, batch_of, build_inner, main, plan_of, train
from tests.parallel.small_model import difference, whole
from tests.ranks import run_ranks

ONE = ParallelConfig(data_parallel="none")
OPTIMIZERS = {"adamw": (torch.optim.AdamW, 1e-3, 1e-12), "sgd": (torch.optim.SGD, 0.5, 1e-13)}


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_five_steps_on_full_shard_2_x_tp_2_equal_one_process(optimizer: str) -> None:
    [reference] = run_ranks(1, five_steps, ONE, optimizer)
    tolerance = OPTIMIZERS[optimizer][2]
    for losses, norms, parameters in run_ranks(4, five_steps, LAYOUT, optimizer):
        assert difference(losses, reference[0]) < tolerance
        assert difference(norms, reference[1]) < tolerance
        assert parameters.keys() == reference[2].keys()
        assert "inner.lm_head.weight" in parameters
        worst = {fqn: difference(values, reference[2][fqn]) for fqn, values in parameters.items()}
        assert max(worst.values()) < tolerance, worst


def five_steps(layout: ParallelConfig, optimizer: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    mesh, module = build_mesh(layout), OwnModule(build_inner())
    trained = parallelize(module, mesh, layout, plan_of(module.inner.config))
    kind, rate, _ = OPTIMIZERS[optimizer]
    optim = trained.build_optimizer(lambda named: kind(list(named.values()), lr=rate))
    losses, norms = [], []
    for step in range(5):
        losses.append(trained.forward_backward([batch_of(mesh, step)]).loss)
        norms.append(trained.clip_gradients(0.5).item())
        optim.step()
    return losses, norms, {fqn: whole(each) for fqn, each in trained.named_parameters().items()}


def test_matrices_are_split_over_both_axes() -> None:
    for shares in run_ranks(4, shares_of_matrices):
        assert set(shares.values()) == {4}


def shares_of_matrices() -> dict[str, int]:
    mesh, module = build_mesh(LAYOUT), OwnModule(build_inner())
    named = parallelize(module, mesh, LAYOUT, plan_of(module.inner.config)).named_parameters()
    return {fqn: each.numel() // local_part(each).numel() for fqn, each in named.items() if each.dim() == 2}


def test_the_loss_is_the_one_that_transformers_computes() -> None:
    [(ours, theirs)] = run_ranks(1, both_losses)
    assert ours == pytest.approx(theirs, rel=1e-6)  # theirs is computed in float32


def both_losses() -> tuple[float, float]:
    inner: Any = build_inner()
    assert type(inner) is transformers.LlamaForCausalLM
    tokens = torch.arange(40).view(2, 20) % 256
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    theirs = inner(tokens, labels=tokens).loss.item()
    return OwnModule(inner)(tokens, labels=labels).item() / 38, theirs


@pytest.mark.slow
def test_the_recipe_shows_that_losses_agree(capfd: pytest.CaptureFixture[str]) -> None:
    main(["--steps", "2"])
    said = capfd.readouterr().out
    assert "fsdp2 full_shard, dp_shard 2 x tp 2: step 2  loss" in said
    assert float(said.split("differ from those of one process by at most ")[1].split()[0]) < 1e-12


@pytest.mark.slow
def test_its_training_takes_any_layout_of_its_plan() -> None:
    [reference] = run_ranks(1, train, ONE, 2)
    for layout in (ParallelConfig(data_parallel="ddp"), ParallelConfig(tp=2, sequence_parallel=False)):
        assert difference(run_ranks(2, train, layout, 2)[1], reference) < 1e-12
