"""What the planner says of plans, and what the ledger says of the same: states to the byte, traffic within a bound."""

import random
from dataclasses import replace

import pytest
import torch

from models.llama import LlamaConfig
from models.moe import MoeConfig
from models.registry import family_of
from parallel.planner.candidate import Candidate, Request
from parallel.planner.exact import Figures, of_ledger, planned
from tests.parallel.planner.requests import PROCESSOR, random_candidates

DENSE = LlamaConfig(num_layers=16, width=128, num_heads=8, num_kv_heads=4, feed_forward_width=384, vocab_size=512)
EXPERTS = replace(MoeConfig.preset("debug"), num_layers=8, vocab_size=512)
LENGTH = 512
BOUND = 0.02
"""What the planner leaves out of traffic, at 512 tokens: gradients of norms that ranks of tp sum, losses, numbers of
rows for experts. It does not grow with tokens, so that it is less for real sequences."""


def both(model: LlamaConfig) -> list[tuple[Candidate, Figures, Figures]]:
    asked = Request(shape=model.shape, gpu=PROCESSOR, num_gpus=8, sequence_length=LENGTH, global_batch=32)
    family = family_of(model)
    with torch.device("meta"):
        whole = family.build(model)
    return [
        (each, planned(asked, each), of_ledger(whole, family.plan(model), each, LENGTH))
        for each in random_candidates(asked, random.Random(0), 80)
    ]


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_states_of_random_plans_are_the_ledgers_to_the_byte_and_traffic_within_2_percent(model: LlamaConfig) -> None:
    plans = both(model)
    sending = dict.fromkeys(("dp", "tp", "cp", "pp", *(["ep"] if model is EXPERTS else [])), 0)
    for candidate, ours, exact in plans:
        assert ours.states == exact.states, candidate
        for name in sending:
            sending[name] += exact.sent[name] > 0
            assert ours.sent[name] == pytest.approx(exact.sent[name], rel=BOUND), (name, candidate)
    assert min(sending.values()) > 10
