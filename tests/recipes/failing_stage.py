"""A job one of whose pipeline stages raises."""

import dataclasses

import torch.distributed as dist
from torch import nn

from parallel import ParallelConfig
from recipes.launch import run
from tests.parallel.small_model import CONFIG, batches, build


class Misfortune(Exception):
    """What happens to one stage."""


def fail_on_second_stage() -> None:
    trained = build(ParallelConfig(pp=2, schedule="interleaved_1f1b"), dataclasses.replace(CONFIG, num_layers=4))

    def fail(_module: nn.Module, _inputs: object) -> None:
        raise Misfortune("of the second stage")

    if dist.get_rank() == 1:
        next(iter(trained.source.get_submodule("blocks").children())).register_forward_pre_hook(fail)
    trained.forward_backward(batches(trained.mesh, 0, 4))


if __name__ == "__main__":
    run(fail_on_second_stage, num_processes=2, debug=False)
