"""Measures the import of a Hugging Face folder of 1 GB: ours beside `from_pretrained` of transformers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.hub_export import save_hub
from checkpoint.hub_folder import read_hub_config
from checkpoint.hub_import import load_hub
from models.llama import Llama, LlamaConfig, llama_plan, to_hub_config
from models.registry import family_of, from_hub_config
from parallel import ParallelConfig, build_mesh, parallelize
from parallel.materialize import allocate, materialize
from recipes.bench import raw_files
from recipes.bench.rounds import Comparison
from recipes.hub import hub_names
from recipes.metrics import peak_bytes

MODEL = LlamaConfig(
    num_layers=14,
    width=1536,
    num_heads=24,
    num_kv_heads=8,
    feed_forward_width=4096,
    vocab_size=49_152,
    tied_embeddings=True,
)
"""About 0.44 thousand million parameters, in bfloat16 0.9 GB."""
PAGE_ELEMENTS = 2048
"""Values of bfloat16 in a page of memory."""
THEIRS, OURS = "transformers from_pretrained", "ours"


def write_folder(folder: str) -> Path:
    """Writes the folder that is imported.

    Args:
        folder: Where; 1 GB must be free.
    """
    config = ParallelConfig(data_parallel="none", dp_shard=1)
    mesh = build_mesh(config, "cpu")
    with torch.device("meta"):
        model = Llama(MODEL)
    trained = parallelize(model, mesh, config, llama_plan(MODEL))
    materialize(trained)
    path = Path(folder) / "hub"
    return save_hub(path, trained, to_hub_config(MODEL), hub_names(MODEL).places(None), dtype=torch.bfloat16)


def compare_import(num_rounds: int, path: str, *, cold: bool = False) -> tuple[Comparison, dict[str, int]]:
    """Times both in processes of their own, in turns, from the first look at the folder to a model with values.

    Args:
        num_rounds: Rounds.
        path: From `write_folder`.
        cold: Drop the files from the page cache before each.

    Returns:
        The times, and by contender the peak of what its process held beyond its libraries.
    """
    times_s: dict[str, list[float]] = {THEIRS: [], OURS: []}
    memory: dict[str, int] = {}
    for number in range(num_rounds):
        for name in (THEIRS, OURS) if number % 2 else (OURS, THEIRS):
            raw_files.set_cached(Path(path), not cold)
            time_s, num_bytes = _measure(name, path)
            times_s[name].append(time_s)
            memory[name] = max(memory.get(name, 0), num_bytes)
    title = f"import of a Hugging Face folder, {'cold' if cold else 'warm'}, one process, bfloat16"
    return Comparison(title=title, times_s=times_s, targets={OURS: 1 / 2.0}), memory


def _measure(name: str, path: str) -> tuple[float, int]:
    done = subprocess.run(
        [sys.executable, "-m", "recipes.bench.hub", name, path], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
    time_s, num_bytes = json.loads(done.stdout.splitlines()[-1])
    return time_s, num_bytes


def _import_theirs(path: str) -> Callable[[], list[Tensor]]:
    import transformers

    # What a first use imports is not the import of a model.
    transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1))

    def load() -> list[Tensor]:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        return list(model.parameters())

    return load


def _import_ours(path: str) -> Callable[[], list[Tensor]]:
    layout = ParallelConfig(data_parallel="none", dp_shard=1)
    mesh = build_mesh(layout, "cpu")

    def load() -> list[Tensor]:
        config = from_hub_config(read_hub_config(path))
        with torch.device("meta"):
            model = family_of(config).build(config).bfloat16()
        trained = parallelize(model, mesh, layout, family_of(config).plan(config))
        allocate(trained)
        load_hub(path, trained, hub_names(config))
        return list(trained.named_parameters().values())

    return load


def main() -> None:
    """Measures one contender in this process and prints seconds and bytes as JSON."""
    name, path = sys.argv[1:]
    torch.set_num_threads(os.cpu_count() or 1)
    load = (_import_theirs if name == THEIRS else _import_ours)(path)
    cpu = torch.device("cpu")
    # Linux starts the peak anew from what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before, start_s = peak_bytes(cpu), time.perf_counter()
    for values in load():
        # What is mapped into memory and not there yet would cost the first step.
        values.detach().view(-1)[::PAGE_ELEMENTS].sum()
    print(json.dumps([time.perf_counter() - start_s, peak_bytes(cpu) - before]))


if __name__ == "__main__":
    main()
