"""Requests of tests, and all candidates of one with nothing skipped."""

import random

from models.llama import LlamaConfig
from parallel.planner.candidate import Candidate, Request
from parallel.planner.choices import choices
from parallel.planner.constants import CONSTANTS
from parallel.planner.costs import model_costs
from parallel.planner.enumeration import candidates, divisors, layouts, legal_degrees, schedules
from parallel.planner.hardware import CPU, Gpu, find_gpu
from parallel.planner.ranking import Plan, evaluate

PROCESSOR = Gpu(
    name=CPU,
    peak_tflops={"float32": 0.1, "bfloat16": 0.1},
    memory_gib=4.0,
    memory_gb_per_s=10.0,
    power_w=1e6,
    gpus_per_node=8,
    node_link_gb_per_s=1.0,
    network_link_gb_per_s=1.0,
    hop_latency_us=50.0,
)
"""Ranks on processors, with figures that do not depend on the machine."""


def request(
    model: str = "llama3.1-8b", gpus: int = 8, batch: int = 32, length: int = 4096, gpu: str = "h100-80gb"
) -> Request:
    return Request(
        shape=LlamaConfig.preset(model).shape,
        gpu=find_gpu(gpu),
        num_gpus=gpus,
        sequence_length=length,
        global_batch=batch,
    )


def random_candidates(asked: Request, generator: random.Random, count: int) -> list[Candidate]:
    """Candidates with degrees, layout and all choices drawn in turn, so that none is rare."""
    costs, degrees = model_costs(asked.shape), legal_degrees(asked)
    found: list[Candidate] = []
    while len(found) < count:
        drawn = generator.choice(degrees)
        configs = list(layouts(asked, drawn, generator.choice(schedules(drawn)), lambda kind: True))
        if not configs:
            continue
        config = generator.choice(configs)
        sizes = divisors(asked.global_batch // (config.dp_replicate * config.dp_shard))
        rows = candidates(asked, config, generator.choice(sizes))
        if rows:
            candidate = generator.choice(generator.choice(rows))
            found.append(candidate._replace(options=generator.choice(choices(asked, costs, candidate))))
    return found


def everything(asked: Request) -> list[Plan]:
    """All candidates, whether they fit or not, with nothing skipped."""
    costs = model_costs(asked.shape)
    return [
        evaluate(asked, costs, candidate._replace(options=options), CONSTANTS)
        for degrees in legal_degrees(asked)
        for schedule in schedules(degrees)
        for config in layouts(asked, degrees, schedule, lambda kind: True)
        for micro_batch in divisors(asked.global_batch // (config.dp_replicate * config.dp_shard))
        for row in candidates(asked, config, micro_batch)
        for candidate in row
        for options in choices(asked, costs, candidate)
    ]
