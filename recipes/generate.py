"""Samples text from a checkpoint, on any mesh: `python -m recipes.generate CHECKPOINT --prompt TEXT`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import tyro

from parallel import ParallelConfig
from recipes.checks import check_fraction, check_integer, check_number
from recipes.command import parse
from recipes.data import (
    TEMPLATES,
    ChatTemplate,
    DataConfig,
    Message,
    TextStream,
    Tokenizer,
    chat_prompt_tokens,
    load_tokenizer,
    prompt_tokens,
)
from recipes.from_checkpoint import check_layout_of, find_checkpoint, load_model, recipe_of
from recipes.launch import run
from recipes.launchers import world_size_to_come
from recipes.messages import one_message
from recipes.recipe import Recipe
from recipes.sampling import draw, next_logits


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Samples text from a checkpoint.

    Attributes:
        checkpoint: A checkpoint, a folder of checkpoints or of a run, of which the newest is taken, or a Hugging Face
            folder.
        prompt: Text to continue, or with `chat` what the user says.
        chat: Answer the prompt as a chat, in the template of the chats that the model was trained on.
        chat_template: That template, where the checkpoint's data do not say it: `plain` or `chatml`.
        num_tokens: Most tokens to sample; the end of a document or of an answer ends the sample.
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
    chat: bool = False
    chat_template: Literal["plain", "chatml"] | None = None
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
        if self.chat_template is not None and not self.chat:
            raise ValueError(f"chat_template={self.chat_template!r} is for chats; give --chat too")

    @property
    def layout(self) -> ParallelConfig:
        """The layout to sample with: a step of one token cannot be split along the sequence, nor is it worth compiling.

        The weights of a layout are the same with and without sequence parallelism, and ranks that would share a
        sequence hold parameters as those of dp_shard, or dp_replicate, do.
        """
        axis = "dp_replicate" if self.parallel.resolved_strategy == "no_shard" else "dp_shard"
        degree = getattr(self.parallel, axis)
        return replace(
            self.parallel,
            **{axis: degree if degree == -1 else degree * self.parallel.cp},
            cp=1,
            cp_method=None,
            sequence_parallel=False,
            compile=False,
            async_tp=False,
            activation_checkpointing="none",
            activation_checkpoint_every=1,
            activation_checkpoint_policy=ParallelConfig.activation_checkpoint_policy,
        )


def generate(command: GenerateCommand, recipe: Recipe) -> Iterator[str]:
    """Loads a checkpoint and samples from it; every rank of the job calls this, and takes all that it gives.

    Args:
        command: What to sample.
        recipe: The recipe that the checkpoint holds.

    Yields:
        The sampled text without the prompt, the same on every rank, piece by piece as it comes.

    Raises:
        ValueError: If the checkpoint or the prompt cannot be used, or the model's logits are not finite.
    """
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    tokens, ends = _prompt(command, recipe.data, tokenizer)
    trained = load_model(command.checkpoint, recipe, command.layout)
    length = len(tokens) + command.num_tokens
    generator = torch.Generator().manual_seed(command.seed)
    text = TextStream(tokenizer, tokens)
    with next_logits(trained, recipe.data.sequence_length, length, cache=command.cache) as logits_of:
        while len(tokens) < length:
            token = draw(logits_of(tokens), command.temperature, command.top_p, generator)
            if token in ends:
                break
            tokens.append(token)
            yield text.add(token)
    yield text.rest()


def _prompt(command: GenerateCommand, data: DataConfig, tokenizer: Tokenizer) -> tuple[list[int], set[int]]:
    """The tokens to go on from, and those that end the sample."""
    if not command.chat:
        return prompt_tokens(tokenizer, command.prompt), {tokenizer.eos}
    template = _chat_template(command, data)
    said = [Message("user", command.prompt.encode("utf-8", errors="surrogateescape"))]
    ends = {tokenizer.eos} if template.end is None else {tokenizer.eos, tokenizer.special(template.end)}
    return chat_prompt_tokens(said, template, tokenizer), ends


def _chat_template(command: GenerateCommand, data: DataConfig) -> ChatTemplate:
    if command.chat_template is not None:
        return TEMPLATES[command.chat_template]
    names = {source.chat_template for source in data.sources if source.record == "chat"}
    if len(names) != 1:
        found = f"on chats of the templates {sorted(names)}" if names else "on no chats that its recipe names"
        raise ValueError(f"{command.checkpoint!r} was trained {found}; name the one to use with --chat-template")
    return TEMPLATES[names.pop()]


def print_sample(command: GenerateCommand, recipe: Recipe) -> None:
    """Samples, and prints prompt and sample on rank 0 as they come; of a chat the answer alone."""
    is_first = True
    for piece in generate(command, recipe):
        if dist.get_rank() == 0:
            # A prompt that is no UTF-8 cannot be printed as it came.
            prompt = command.prompt.encode(errors="surrogateescape").decode(errors="replace")
            print(prompt + piece if is_first and not command.chat else piece, end="", flush=True)
        is_first = False
    if dist.get_rank() == 0:
        print(flush=True)


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
        if command.chat:
            _chat_template(command, recipe.data)
    run(print_sample, command, recipe, num_processes=command.nproc, debug=debug)


if __name__ == "__main__":
    main()
