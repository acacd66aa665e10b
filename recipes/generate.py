"""Samples text from a checkpoint, on any mesh: `python -m recipes.generate CHECKPOINT --prompt TEXT`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from models.layers.kv_cache import kv_cache
from parallel import ParallelConfig, Trained
from recipes.checks import check_fraction, check_integer, check_number
from recipes.command import parse
from recipes.data import load_tokenizer, prompt_tokens
from recipes.from_checkpoint import check_layout_of, find_checkpoint, load_model, recipe_of
from recipes.launch import run
from recipes.launchers import world_size_to_come
from recipes.messages import one_message
from recipes.recipe import Recipe

NextLogits = Callable[[list[int]], Tensor]
"""Logits [V] of the token after all tokens so far, which only grow from call to call."""


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Samples text from a checkpoint.

    Attributes:
        checkpoint: A checkpoint, or a folder of checkpoints or of a run, of which the newest is taken.
        prompt: Text to continue.
        num_tokens: Most tokens to sample; the end of a document ends the sample.
        temperature: Divides the logits: below 1 the likely becomes likelier; 0 always takes the likeliest.
        top_p: Draw among the likeliest tokens only that together have this probability; 1: among all.
        cache: Keep keys and values of the tokens so far and compute the new one alone. Without, every token computes
            all of them again: the same text, slower.
        seed: Seed of the sampling.
        nproc: Ranks to start on this machine when no launcher has; default: one for each GPU, or 2 without any.
        debug: Show the traceback of an error.
        parallel: How the model is split over the ranks, whatever layout wrote the checkpoint. Sequence parallelism,
            compile and activation checkpointing are for training and stay off.
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    prompt: str = ""
    num_tokens: int = 200
    temperature: float = 0.8
    top_p: float = 1.0
    cache: bool = True
    seed: int = 0
    nproc: int | None = None
    debug: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range.
        """
        check_integer("num_tokens", self.num_tokens, minimum=1)
        check_integer("seed", self.seed, minimum=0)
        check_number("temperature", self.temperature)
        check_fraction("top_p", self.top_p)
        if self.top_p == 0:
            raise ValueError("top_p=0 leaves no token to draw; use temperature 0 for the likeliest")

    @property
    def layout(self) -> ParallelConfig:
        """The layout to sample with: a step of one token cannot be split along the sequence, nor is it worth compiling.

        The weights of a layout are the same with and without sequence parallelism.
        """
        return replace(
            self.parallel,
            sequence_parallel=False,
            compile=False,
            activation_checkpointing="none",
            activation_checkpoint_every=1,
        )


def generate(command: GenerateCommand, recipe: Recipe) -> str:
    """Loads a checkpoint and samples from it; every rank of the job calls this.

    Args:
        command: What to sample.
        recipe: The recipe that the checkpoint holds.

    Returns:
        The sampled text, without the prompt, the same on every rank.

    Raises:
        ValueError: If the checkpoint cannot be loaded.
    """
    trained = load_model(command.checkpoint, recipe, command.layout)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    tokens = prompt_tokens(tokenizer, command.prompt)
    start = len(tokens)
    generator = torch.Generator().manual_seed(command.seed)
    with next_logits(
        trained, recipe.data.sequence_length, start + command.num_tokens, cache=command.cache
    ) as logits_of:
        while len(tokens) < start + command.num_tokens:
            token = _shared(sample(logits_of(tokens).cpu(), command.temperature, command.top_p, generator), trained)
            if token == tokenizer.eos:
                break
            tokens.append(token)
    return tokenizer.decode(tokens[start:])


@contextmanager
def next_logits(trained: Trained, context: int, num_tokens: int, *, cache: bool) -> Iterator[NextLogits]:
    """Gives a function from tokens to the logits of the next one; every rank calls it together.

    The model sees no more than the length that it was trained on. Where the tokens outgrow it, it goes on with the
    latest half, so that a cache has to be filled anew only once in half a length.

    Args:
        trained: The model.
        context: Most tokens that it sees.
        num_tokens: Tokens that there will be at most.
        cache: Keep keys and values from call to call.
    """

    def window(length: int) -> int:
        """Where what the model sees begins."""
        half = max(1, context // 2)
        return 0 if length <= context else -(-(length - context) // half) * half

    def uncached(tokens: list[int]) -> Tensor:
        return _last_logits(trained, tokens[window(len(tokens)) :], 0)

    if not cache:
        yield uncached
        return
    with kv_cache(trained.source, min(context, num_tokens)) as kept:
        begin = 0

        def cached(tokens: list[int]) -> Tensor:
            nonlocal begin
            if window(len(tokens)) != begin:
                begin = window(len(tokens))
                kept.clear()
            return _last_logits(trained, tokens[begin + kept.length :], kept.length)

        yield cached


def _last_logits(trained: Trained, tokens: list[int], position: int) -> Tensor:
    """Logits [V] after the last of some tokens, the first of which has the given position."""
    row = torch.tensor([tokens], device=trained.mesh.device)
    positions = torch.arange(position, position + len(tokens), device=trained.mesh.device).unsqueeze(0)
    return trained.logits(row, positions=positions)[0, -1]


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draws a token.

    Args:
        logits: Logits of the vocabulary, [V], on the CPU.
        temperature: Divides them; 0 takes the largest.
        top_p: Draw among the likeliest only that together have this probability; 1: among all.
        generator: Source of the draw.

    Source of top_p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # The token that reaches top_p is still among them, and so is the first.
        enough = ordered.cumsum(0) - ordered >= top_p
        probabilities[order[enough]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator)[0])


def _shared(token: int, trained: Trained) -> int:
    """What rank 0 has drawn: ranks compute the same logits up to rounding, which could tip a draw."""
    drawn = torch.tensor(token, device=trained.mesh.device)
    dist.broadcast(drawn, src=0)
    return int(drawn)


def print_sample(command: GenerateCommand, recipe: Recipe) -> None:
    """Samples, and prints prompt and sample on rank 0."""
    text = generate(command, recipe)
    if dist.get_rank() == 0:
        # A prompt that is no UTF-8 cannot be printed as it came.
        prompt = command.prompt.encode(errors="surrogateescape").decode(errors="replace")
        print(prompt + text, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.
    """
    debug = "--debug" in (sys.argv if arguments is None else arguments)
    with one_message(debug=debug):
        command = parse(GenerateCommand, arguments, "python -m recipes.generate")
        command = replace(command, checkpoint=find_checkpoint(command.checkpoint))
        recipe = recipe_of(command.checkpoint)
        check_layout_of(recipe, command.layout, world_size_to_come(command.nproc))
    run(print_sample, command, recipe, num_processes=command.nproc, debug=debug)


if __name__ == "__main__":
    main()
