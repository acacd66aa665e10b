"""The command line of `recipes.plan` and the request that it makes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from parallel.planner.candidate import Compute, Reduce, Request
from parallel.planner.explain import MOST_GPUS
from parallel.planner.hardware import CPU, Gpu, find_gpu
from recipes.plan.models import find_shape
from recipes.plan.this_machine import measure_machine


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Predicts memory and speed of every legal layout of a model, and ranks those that fit; needs no GPU.

    Exit codes: 0 a plan was found; 1 an error, which stderr names; 2 a wrong command line; 3 nothing fits, and stderr
    says what is missing and what would work.

    Attributes:
        model: A preset, such as llama3.1-70b, or a shape that published results use, such as gpt-175b.
        gpus: How many GPUs.
        gpu: The kind of GPU, by its name in the table or in `--gpu-table`; cpu: ranks on this machine, measured now.
        seq: Tokens of a sequence.
        global_batch: Sequences of a step, over all GPUs.
        headroom: Share of a GPU's memory that stays free.
        reduce: Dtype in which gradients are summed over ranks; any: bfloat16 where it gains enough.
        frozen: Share of the parameters that is not trained, such as 0.99 beside adapters.
        compute: Dtype of matmuls and activations; float8 is for the linear maps of blocks, beside bfloat16; default:
            bfloat16 on GPUs, and stored, which is float32, on this machine's processors.
        compile: Compile blocks where the layout allows it; default: on GPUs.
        gpu_table: TOML file with more GPUs, or other figures for known ones.
        top: Plans to show.
        explain: Walk the guide by which people choose a layout with these numbers, and say where the planner differs.
        frontier: File that ends in .png, to draw memory against speed to.
        scaling: File that ends in .png, to draw speed and memory over data-parallel ranks to.
        write: File that ends in .py, to write the best plan to as a recipe for recipes.train.
        tune: Run so many of the best plans for some steps on this machine, and pick by measurement.
        tune_steps: Steps of each that are timed.
        tune_file: Where measurements are remembered.
        claims: Print figures of tutorials, each with the planner's.
        rows: Print errors of predictions for published results: `published`, or a CSV file with the same columns.
        json: Print what is for programs.
        debug: Show the traceback of an error.
    """

    model: Annotated[str, tyro.conf.Positional] = ""
    gpus: int = 0
    gpu: str = "h100-80gb"
    seq: int = 8192
    global_batch: int = 512
    headroom: float = 0.1
    reduce: Literal["any", "float32", "bfloat16"] = "any"
    frozen: float = 0.0
    compute: Compute | None = None
    compile: bool | None = None
    gpu_table: str | None = None
    top: int = 5
    explain: bool = False
    frontier: str | None = None
    scaling: str | None = None
    write: str | None = None
    tune: int = 0
    tune_steps: int = 3
    tune_file: str = "runs/plan/tuned.json"
    claims: bool = False
    rows: str | None = None
    json: bool = False
    debug: bool = False

    def check(self) -> None:
        """Checks the ranges.

        Raises:
            ValueError: If a value is out of its range, or nothing is asked for.
        """
        if self.top < 1:
            raise ValueError(f"top={self.top} must be at least 1")
        if self.tune < 0 or self.tune_steps < 1:
            raise ValueError(f"tune={self.tune} must be at least 0 and tune_steps={self.tune_steps} at least 1")
        if self.frozen and (self.tune or self.write):
            raise ValueError(
                f"frozen={self.frozen}: recipes of plans train all parameters; leave out --tune and --write"
            )
        if self.write is not None and not Path(self.write).absolute().parent.is_dir():
            raise ValueError(f"write={self.write!r}: there is no such folder; make it first")
        for name in ("frontier", "scaling"):
            path = getattr(self, name)
            if path is not None and not path.endswith(".png"):
                raise ValueError(f"{name}={path!r} must end in .png")
        if self.model and not 1 <= self.gpus <= MOST_GPUS:
            raise ValueError(f"gpus={self.gpus} must be from 1 to {MOST_GPUS:,}: say --gpus N")
        if not (self.claims or self.rows) and not self.model:
            raise ValueError(
                "name a model and a number of GPUs, such as `llama3.1-70b --gpus 256`, or ask for --claims or --rows"
            )

    def request(self) -> Request:
        """What is to be trained on what.

        Raises:
            ValueError: If the model or the GPU is unknown, or a value is out of its range.
            OSError: If the table of GPUs cannot be read.
        """
        shape = find_shape(self.model)
        gpu = self._gpu()
        on_cpu = gpu.name == CPU
        reduces: tuple[Reduce, ...] = ("float32", "bfloat16") if self.reduce == "any" else (self.reduce,)
        return Request(
            shape=shape,
            gpu=gpu,
            num_gpus=self.gpus,
            sequence_length=self.seq,
            global_batch=self.global_batch,
            headroom=self.headroom,
            compile=not on_cpu if self.compile is None else self.compile,
            compute=self.compute or ("stored" if on_cpu else "bfloat16"),
            reduces=reduces,
            frozen=self.frozen,
        )

    def _gpu(self) -> Gpu:
        if self.gpu != CPU:
            return find_gpu(self.gpu, self.gpu_table)
        return replace(measure_machine(self.gpus), name=CPU)
