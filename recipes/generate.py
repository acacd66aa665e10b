"""Samples text from a checkpoint, on any mesh: `python -m recipes.generate CHECKPOINT --prompt TEXT`."""

import os
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from checkpoint import TrainState, latest, load, read_manifest
from checkpoint.manifest import MANIFEST_NAME
from parallel import ParallelConfig, build_mesh
from parallel.materialize import allocate
from recipes.checks import check_integer, check_number
from recipes.command import parse
from recipes.data import load_tokenizer, prompt_tokens
from recipes.launch import run
from recipes.launchers import world_size_to_come
from recipes.messages import one_message
from recipes.recipe import Recipe
from recipes.structure import from_json
from recipes.train import build_model


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Samples text from a checkpoint.

    Attributes:
        checkpoint: A checkpoint, or a folder of checkpoints or of a run, of which the newest is taken.
        prompt: Text to continue.
        num_tokens: Most tokens to sample; the end of a document ends the sample.
        temperature: Divides the logits: below 1 the likely becomes likelier; 0 always takes the likeliest.
        seed: Seed of the sampling.
        nproc: Ranks to start on this machine when no launcher has; default: one for each GPU, or 2 without any.
        debug: Show the traceback of an error.
        parallel: How the model is split over the ranks, whatever layout wrote the checkpoint.
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    prompt: str = ""
    num_tokens: int = 200
    temperature: float = 0.8
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
    recipe = replace(recipe, parallel=command.parallel)
    mesh = build_mesh(recipe.parallel)
    trained = build_model(recipe, mesh)
    allocate(trained)
    load(command.checkpoint, TrainState(trained=trained), parts=("model",))
    context = recipe.data.sequence_length
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    tokens = prompt_tokens(tokenizer, command.prompt)
    start = len(tokens)
    generator = torch.Generator().manual_seed(command.seed)
    while len(tokens) < start + command.num_tokens:
        # Beyond the length it was trained on, the model sees the latest part only.
        window = torch.tensor([tokens[-context:]], device=mesh.device)
        token = sample(trained.logits(window)[0, -1].cpu(), command.temperature, generator)
        if token == tokenizer.eos:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[start:])


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draws a token on rank 0 and gives it to all ranks.

    Args:
        logits: Logits of the vocabulary, [V], on the CPU.
        temperature: Divides them; 0 takes the largest.
        generator: Source of the draw.
    """
    if temperature == 0:
        drawn = logits.argmax()
    else:
        probabilities = torch.softmax(logits.double() / temperature, dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)[0]
    # Ranks compute the same logits up to rounding, which could tip the draw.
    shared: list[int] = [int(drawn)]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def print_sample(command: GenerateCommand, recipe: Recipe) -> None:
    """Samples, and prints prompt and sample on rank 0."""
    text = generate(command, recipe)
    if dist.get_rank() == 0:
        # A prompt that is no UTF-8 cannot be printed as it came.
        prompt = command.prompt.encode(errors="surrogateescape").decode(errors="replace")
        print(prompt + text, flush=True)


def find_checkpoint(path: str) -> str:
    """One checkpoint of a path that may be that, a folder of them, or the folder of a run.

    Args:
        path: The path.

    Raises:
        ValueError: If there is none.
    """
    if not os.path.isdir(path):
        raise ValueError(f"there is no checkpoint: {path!r} is not a folder")
    if os.path.exists(os.path.join(path, MANIFEST_NAME)):
        return path
    found = latest(path) or latest(os.path.join(path, "checkpoints"))
    if found is None:
        raise ValueError(f"{path!r} holds no complete checkpoint (a folder step-<number> with {MANIFEST_NAME})")
    return str(found)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.
    """
    debug = "--debug" in (sys.argv if arguments is None else arguments)
    with one_message(debug=debug):
        command = parse(GenerateCommand, arguments, "python -m recipes.generate")
        command = replace(command, checkpoint=find_checkpoint(command.checkpoint))
        recipe = from_json(read_manifest(command.checkpoint).header.recipe)
        replace(recipe, parallel=command.parallel).check(world_size_to_come(command.nproc))
    run(print_sample, command, recipe, num_processes=command.nproc, debug=debug)


if __name__ == "__main__":
    main()
