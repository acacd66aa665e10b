"""Measures a checkpoint on text, on any mesh: `python -m recipes.evaluate CHECKPOINT [--data.source FILES]`."""

import itertools
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from parallel import IGNORE_INDEX, Batch, ParallelConfig
from recipes.checks import check_integer
from recipes.command import parse
from recipes.data import ByteTokenizer, DataConfig, Tokenizer, collate, load_dataset, load_tokenizer
from recipes.data.config import WeightedSource
from recipes.from_checkpoint import check_layout_of, find_checkpoint, load_model, recipe_of
from recipes.launch import run
from recipes.launchers import is_first_rank, world_size_to_come
from recipes.messages import one_message
from recipes.recipe import Recipe

USAGE = "usage: python -m recipes.evaluate CHECKPOINT [--help] [--data.source FILE_OR_FOLDER] [options]"

BATCHES_AT_A_TIME = 16
"""Micro-batches that a rank holds at a time."""


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Perplexity of a checkpoint on text.

    Attributes:
        side: Which side of the text: `all`, or what `held_out_fraction` keeps for evaluation (`held_out`). Default:
            held_out where the text is the one that the checkpoint was trained on, all of any other.
        max_sequences: Evaluate on no more sequences, evenly spread over the text; 0 takes all.
        micro_batch: Sequences that one rank runs through the model at a time.
        nproc: Ranks to start on this machine when no launcher has; default: one for each GPU, or 2 without any.
        debug: Show the traceback of an error.
        data: The text; what is not said is as in the recipe of the checkpoint.
        parallel: How the model is split over the ranks, whatever layout wrote the checkpoint.
    """

    side: Literal["all", "held_out"] | None = None
    max_sequences: int = 0
    micro_batch: int = 8
    nproc: int | None = None
    debug: bool = False
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        check_integer("max_sequences", self.max_sequences, minimum=0)
        check_integer("micro_batch", self.micro_batch, minimum=1)

    def text_of(self, recipe: Recipe) -> tuple[DataConfig, Literal["all", "held_out"]]:
        """The text to evaluate on, and which side of it.

        Args:
            recipe: That of the checkpoint.
        """
        own = [_located(each) for each in self.data.sources] == [_located(each) for each in recipe.data.sources]
        side = self.side or ("held_out" if own else "all")
        if side == "held_out":
            return self.data, side
        mixture = tuple(replace(each, held_out_fraction=0.0) for each in self.data.mixture)
        if mixture:
            return replace(self.data, mixture=mixture), side
        return replace(self.data, held_out_fraction=0.0), side


def _located(source: WeightedSource) -> WeightedSource:
    """The same source, however its path is written."""
    return replace(source, source=str(Path(source.source).resolve()))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation measured, the same on every rank.

    Attributes:
        loss_sum: Loss summed over all tokens, in nats.
        num_tokens: Tokens that were predicted.
        num_bytes: Bytes of the text that they stand for.
        num_sequences: Sequences.
        sequence_length: Tokens of each at most, of which a model sees those before.
    """

    loss_sum: float
    num_tokens: int
    num_bytes: int
    num_sequences: int
    sequence_length: int

    @property
    def nats_per_token(self) -> float:
        """Mean loss a token."""
        return self.loss_sum / self.num_tokens if self.num_tokens else float("nan")

    @property
    def nats_per_byte(self) -> float:
        """Loss a byte of text, which compares models of different tokenizers."""
        return self.loss_sum / self.num_bytes if self.num_bytes else float("nan")

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss a token."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    def describe(self) -> str:
        """The figures, a line for each kind."""
        return (
            f"on         {self.num_tokens:,} tokens for {self.num_bytes:,} bytes, in {self.num_sequences:,} sequences "
            f"of {self.sequence_length:,}\n"
            f"loss       {self.nats_per_token:.4f} nats a token, {self.nats_per_byte:.4f} nats a byte "
            f"({self.nats_per_byte / math.log(2):.4f} bits)\n"
            f"perplexity {self.perplexity:.4f} a token"
        )


def evaluate(checkpoint: str, command: EvaluateCommand, recipe: Recipe) -> Evaluation:
    """Measures a checkpoint; every rank of the job calls this.

    Args:
        checkpoint: One checkpoint.
        command: On what, and how.
        recipe: The recipe that it holds.

    Raises:
        ValueError: If the text or the checkpoint cannot be used.
    """
    data, side = command.text_of(recipe)
    text = load_dataset(data)
    dataset = text.train if side == "all" else text.held_out
    if dataset is None:
        raise ValueError(
            "nothing of the text is held out (held_out_fraction=0, or too few files): use --side all for all of it, or "
            "name another text with --data.source"
        )
    trained, tokenizer = load_model(checkpoint, recipe, command.parallel), load_tokenizer(data.tokenizer)
    mesh, micro_batch = trained.mesh, command.micro_batch
    num_sequences = min(dataset.num_samples, command.max_sequences or dataset.num_samples)
    mine = spread(dataset.num_samples, num_sequences)[mesh.coordinate("dp") :: mesh.degree("dp")]
    # As many on every rank, since every evaluation is a collective.
    num_batches = -(-num_sequences // (micro_batch * mesh.degree("dp")))
    loss_sum, num_tokens, num_bytes = 0.0, 0, 0
    for first in range(0, num_batches, BATCHES_AT_A_TIME):
        indices = range(first, min(first + BATCHES_AT_A_TIME, num_batches))
        rows = [mine[index * micro_batch : (index + 1) * micro_batch] for index in indices]
        batches = [collate(dataset, ids, micro_batch) for ids in rows]
        result = trained.evaluate(batches)
        loss_sum, num_tokens = loss_sum + result.loss_sum, num_tokens + result.num_valid_tokens
        num_bytes += sum(count_bytes(batch, tokenizer) for batch in batches)
    all_bytes = torch.tensor(num_bytes, device=mesh.device)
    dist.all_reduce(all_bytes, group=mesh.group("dp"))
    return Evaluation(
        loss_sum=loss_sum,
        num_tokens=num_tokens,
        num_bytes=int(all_bytes),
        num_sequences=num_sequences,
        sequence_length=data.sequence_length,
    )


def spread(num_samples: int, num_taken: int) -> list[int]:
    """Samples evenly spread over all, the same on every mesh.

    Args:
        num_samples: How many there are.
        num_taken: How many to take.
    """
    return [index * num_samples // num_taken for index in range(num_taken)]


def count_bytes(batch: Batch, tokenizer: Tokenizer) -> int:
    """Bytes of text that the predicted tokens of a batch stand for.

    Exact for one token a byte; a character that a sequence cuts counts some bytes too many with others.

    Args:
        batch: The batch.
        tokenizer: Which text its tokens stand for.
    """
    labels = batch.labels
    if isinstance(tokenizer, ByteTokenizer):
        return int(((labels != IGNORE_INDEX) & (labels < 256)).sum())
    num_bytes = 0
    for row in labels.tolist():
        for is_predicted, tokens in itertools.groupby(row, lambda label: label != IGNORE_INDEX):
            num_bytes += len(tokenizer.decode(tokens).encode()) if is_predicted else 0
    return num_bytes


def print_evaluation(checkpoint: str, command: EvaluateCommand, recipe: Recipe) -> None:
    """Measures, and prints on rank 0."""
    evaluation = evaluate(checkpoint, command, recipe)
    if dist.get_rank() == 0:
        data, side = command.text_of(recipe)
        print(f"checkpoint {checkpoint}")
        sources = ", ".join(each.source for each in data.sources)
        print(f"text       {sources}, {'all of it' if side == 'all' else 'what is held out of it'}")
        print(evaluation.describe(), flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    with one_message(debug=debug):
        if not words or words[0] in ("-h", "--help"):
            if is_first_rank():
                print(f"{USAGE}\nThe options follow, with the defaults of a checkpoint whose recipe sets none.\n")
            parse(EvaluateCommand, ["--help"], "python -m recipes.evaluate CHECKPOINT")
        path, *options = words
        if path.startswith("-"):
            raise ValueError(f"the first word must be a checkpoint, got {path!r}; {USAGE}")
        checkpoint = find_checkpoint(path)
        recipe = recipe_of(checkpoint)
        default = EvaluateCommand(data=recipe.data, micro_batch=recipe.training.micro_batch)
        command = parse(EvaluateCommand, options, f"python -m recipes.evaluate {path}", default)
        check_layout_of(replace(recipe, data=command.data), command.parallel, world_size_to_come(command.nproc))
    run(print_evaluation, checkpoint, command, recipe, num_processes=command.nproc, debug=debug)


if __name__ == "__main__":
    main()
