"""Measures our Llama against that of `transformers`, with the same weights, in one process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from models.llama import Llama, LlamaConfig, to_hub_name
from recipes.bench.loops import random_batch
from recipes.bench.rounds import Comparison, interleave
from recipes.metrics import peak_bytes

MODEL = LlamaConfig(num_layers=4, width=256, num_heads=8, num_kv_heads=4, feed_forward_width=688, vocab_size=49_152)
LENGTH = 1024
TRANSFORMERS, OURS = "transformers", "ours"


def compare_models(num_rounds: int) -> Comparison:
    """Forward and backward of both.

    Args:
        num_rounds: Rounds.
    """
    torch.set_num_threads(1)
    return Comparison(
        title=f"Llama forward and backward, vocabulary {MODEL.vocab_size:,}, sequence {LENGTH:,}, one process",
        times_s=interleave(
            {TRANSFORMERS: _step(TRANSFORMERS), OURS: _step(OURS)}, num_rounds=num_rounds, steps_of_a_round=1
        ),
        targets={OURS: 0.90},
    )


def peak_memory() -> dict[str, int]:
    """Bytes that a forward and backward adds to the memory of a process that holds the model, by contender.

    Each runs in a process of its own, since the peak of a process never falls.
    """
    return {name: _measure_apart(name) for name in (TRANSFORMERS, OURS)}


def _measure_apart(name: str) -> int:
    code = f"from recipes.bench.model import print_peak; print_peak({name!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring {name} failed: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def print_peak(name: str) -> None:
    """Runs one contender and prints by how many bytes a step raised the peak.

    Args:
        name: The contender.
    """
    torch.set_num_threads(1)
    step = _step(name)
    cpu = torch.device("cpu")
    # Linux starts the peak anew from what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes(cpu)
    step()
    print(peak_bytes(cpu) - before)


def _step(name: str) -> Callable[[], object]:
    batch = random_batch(0, rows=1, length=LENGTH, vocab_size=MODEL.vocab_size)
    torch.manual_seed(0)
    ours = Llama(MODEL)
    if name == OURS:

        def step() -> None:
            ours.zero_grad()
            (ours(batch.tokens, labels=batch.labels) / LENGTH).backward()

        return step
    theirs = _transformers_twin(ours)

    def their_step() -> None:
        theirs.zero_grad()
        # Their loss shifts labels by itself.
        labels = torch.cat([batch.tokens[:, :1], batch.labels[:, :-1]], dim=1)
        theirs(input_ids=batch.tokens, labels=labels, use_cache=False).loss.backward()

    return their_step


def _transformers_twin(ours: Llama) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=MODEL.width,
        intermediate_size=MODEL.feed_forward_width,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_heads,
        num_key_value_heads=MODEL.num_kv_heads,
        vocab_size=MODEL.vocab_size,
        max_position_embeddings=MODEL.max_sequence_length,
        rms_norm_eps=MODEL.norm_eps,
    )
    theirs = transformers.LlamaForCausalLM(config)
    theirs.set_attn_implementation("sdpa")
    weights = {to_hub_name(fqn): parameter.detach() for fqn, parameter in ours.named_parameters()}
    theirs.load_state_dict(weights)
    return theirs
