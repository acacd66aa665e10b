"""Modules split over ranks compute what whole ones do, where sizes do not divide too."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from models.llama import Llama, LlamaConfig, llama_plan
from parallel import Batch, ParallelConfig, Trained, build_mesh, parallelize
from parallel.layout import check_layout
from tests.parallel.small_model import build, difference, whole
from tests.ranks import run_ranks

# Entries of the vocabulary by degree; on four ranks the last one holds 1 of 10 entries.
VOCABULARIES = {2: (259,), 4: (10,)}
SPLITS: list[dict[str, Any]] = [
    {"sequence_parallel": sequence, "loss_parallel": loss} for sequence in (True, False) for loss in (True, False)
]
Outcome = tuple[float, dict[str, Tensor], Tensor]
"""Loss, gradients and logits."""


def step(trained: Trained, vocab_size: int) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, vocab_size, (2, 8), generator=generator) for _ in range(2))
    labels[0, :3] = -100
    result = trained.forward_backward([Batch.from_tokens(tokens, labels)])
    gradients = {fqn: whole(each.grad) for fqn, each in trained.named_parameters().items() if each.grad is not None}
    return result.loss, gradients, trained.logits(tokens)


def model(vocab_size: int, tied: bool) -> LlamaConfig:
    return LlamaConfig(num_layers=1, vocab_size=vocab_size, tied_embeddings=tied)


def outcomes(vocabularies: tuple[int, ...], layouts: list[dict[str, Any]]) -> list[list[Outcome]]:
    """By vocabulary, tied where the number of the layout is odd, and layout."""
    return [
        [
            step(build(ParallelConfig(**fields), model(vocab_size, tied=bool(index % 2))), vocab_size)
            for index, fields in enumerate(layouts)
        ]
        for vocab_size in vocabularies
    ]


def test_a_vocabulary_that_does_not_divide_gives_the_numbers_of_one_process() -> None:
    one = {"data_parallel": "none"}
    for degree, vocabularies in VOCABULARIES.items():
        references = run_ranks(1, outcomes, vocabularies, [one, one])[0]
        for found in run_ranks(degree, outcomes, vocabularies, [{"tp": degree, **split} for split in SPLITS]):
            for vocab_size, by_layout, reference in zip(vocabularies, found, references, strict=True):
                for index, (loss, gradients, logits) in enumerate(by_layout):
                    expected = reference[index % 2]
                    case = (degree, vocab_size, SPLITS[index])
                    assert abs(loss - expected[0]) < 1e-14 * expected[0], case
                    assert difference(logits, expected[2]) < 1e-13, case
                    assert gradients.keys() == expected[1].keys(), case
                    assert all(difference(gradients[fqn], expected[1][fqn]) < 1e-13 for fqn in gradients), case


def test_a_vocabulary_too_small_to_give_each_rank_an_entry_is_refused() -> None:
    config = ParallelConfig(tp=4, dp_shard=1)
    with pytest.raises(ValueError, match=r"tp=4 leaves a rank without any of vocab_size=5; legal here: \[1, 2, 3\]"):
        check_layout(config, model(5, tied=False).shape)
    check_layout(config, model(7, tied=False).shape)


def test_each_style_places_its_parameters_as_it_says() -> None:
    for with_sequence, without in run_ranks(2, placements):
        split = {
            "embed.weight": "S(0)",
            "blocks.0.attention.q_proj.weight": "S(0)",
            "blocks.0.attention.q_proj.bias": "S(0)",
            "blocks.0.attention.o_proj.weight": "S(1)",
            "blocks.0.feed_forward.up_proj.weight": "S(0)",
            "blocks.0.feed_forward.down_proj.weight": "S(1)",
            "blocks.0.attention.q_norm.weight": "R",
            "head.weight": "S(0)",
        }
        norms = ("blocks.0.attention_norm.weight", "blocks.0.feed_forward_norm.weight", "norm.weight")
        assert split.items() <= with_sequence.items() and split.items() <= without.items()
        assert all((with_sequence[fqn], without[fqn]) == ("R", "plain") for fqn in norms)


def placements() -> list[dict[str, str]]:
    """How the tensor-parallel axis alone has placed each parameter."""
    from parallel.tensor_parallel import apply_tensor_parallel

    config = LlamaConfig(num_layers=1, qk_norm=True, attention_bias=True)
    mesh, found = build_mesh(ParallelConfig(tp=2)), []
    for sequence_parallel in (True, False):
        with torch.device("meta"):
            llama = Llama(config)
        styles = llama_plan(config).tensor_parallel
        apply_tensor_parallel(
            llama, mesh["tp"], styles, sequence_parallel=sequence_parallel, loss_parallel=sequence_parallel
        )
        assert llama.head is not None and llama.head.tensor_parallel is not None
        assert llama.head.tensor_parallel.loss_parallel == sequence_parallel
        found.append({fqn: _placement(each) for fqn, each in llama.named_parameters()})
    return found


def _placement(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "plain"
    (placement,) = parameter.placements
    return "R" if isinstance(placement, Replicate) else f"S({placement.dim})" if isinstance(placement, Shard) else "?"


def test_frozen_parameters_stay_frozen() -> None:
    assert run_ranks(2, trainable) == [["norm.weight"]] * 2


def trainable() -> list[str]:
    config = ParallelConfig(tp=2)
    mesh = build_mesh(config)
    with torch.device("meta"):
        llama = Llama(LlamaConfig(num_layers=1))
    for fqn, parameter in llama.named_parameters():
        parameter.requires_grad_(fqn == "norm.weight")
    trained = parallelize(llama, mesh, config, llama_plan(LlamaConfig(num_layers=1)))
    return [fqn for fqn, parameter in trained.named_parameters().items() if parameter.requires_grad]
