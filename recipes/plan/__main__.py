"""The command `python -m recipes.plan MODEL`."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from models.llama import LlamaConfig
from parallel.planner.candidate import Request
from parallel.planner.explain import refusal
from parallel.planner.hardware import find_gpu, read_gpus
from parallel.planner.search import search
from recipes.command import parse
from recipes.messages import one_message
from recipes.plan.recipe_file import write_recipe
from recipes.plan.report import as_json, show

NOTHING_FITS = 3
"""Exit code where no layout fits; the message says what would."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Predicts memory and speed of every legal layout of a model, and ranks those that fit; needs no GPU.

    What fsdp1 would take is what is predicted of fsdp2. Exit codes: 0 a plan was found; 1 an error, which stderr names;
    2 a wrong command line; 3 nothing fits, and stderr says what is missing and what would work.

    Attributes:
        model: A preset, such as llama3.1-70b.
        gpus: How many GPUs.
        gpu: The kind of GPU, by its name in the table or in `--gpu-table`.
        seq: Tokens of a sequence.
        global_batch: Sequences of a step, over all GPUs.
        headroom: Share of a GPU's memory that stays free.
        reduce: Dtype in which gradients are summed over ranks.
        compile: Compile blocks where the schedule allows it.
        gpu_table: TOML file with more GPUs, or other figures for known ones.
        top: Plans to show.
        recipe: File that ends in .py, to write the best plan to as a recipe for recipes.train.
        json: Print what is for programs.
        debug: Show the traceback of an error.
    """

    model: Annotated[str, tyro.conf.Positional]
    gpus: int
    gpu: str
    seq: int = 8192
    global_batch: int = 512
    headroom: float = 0.1
    reduce: Literal["float32", "bfloat16"] = "float32"
    compile: bool = True
    gpu_table: str | None = None
    top: int = 5
    recipe: str | None = None
    json: bool = False
    debug: bool = False


def main(arguments: list[str] | None = None) -> None:
    """Runs the command.

    Args:
        arguments: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: With a code other than 0, where something is wrong or nothing fits.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with one_message(debug="--debug" in words):
        command = parse(PlanCommand, words, "python -m recipes.plan")
        if command.top < 1:
            raise ValueError(f"top={command.top} must be at least 1")
        request = Request(
            shape=LlamaConfig.preset(command.model).shape,
            gpu=find_gpu(command.gpu, command.gpu_table),
            num_gpus=command.gpus,
            sequence_length=command.seq,
            global_batch=command.global_batch,
            headroom=command.headroom,
            compile=command.compile,
            reduce=command.reduce,
        )
        found = search(request, most=command.top)
        if not found.plans:
            print(f"error: {refusal(request, found, read_gpus(command.gpu_table))}", file=sys.stderr)
            raise SystemExit(NOTHING_FITS)
        if command.recipe is not None:
            write_recipe(command.recipe, command.model, found.plans[0])
        if command.json:
            print(json.dumps(as_json(command.model, found), indent=1))
        else:
            show(command.model, found)


if __name__ == "__main__":
    main()
