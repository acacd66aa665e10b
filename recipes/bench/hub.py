"""Measures the import of a Hugging Face folder of 1 GB: ours beside `from_pretrained` of transformers."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.hub.folder import read_hub_config
from checkpoint.hub.load import load_hub
from checkpoint.hub.save import save_hub
from models.config import ModelConfig
from models.llama import LlamaConfig, to_hub_config
from models.registry import family_of, from_hub_config
from parallel import Mesh, ParallelConfig, Trained, build_mesh, parallelize
from parallel.materialize import allocate
from parallel.replicas import local_part
from recipes.bench import raw_files
from recipes.bench.rounds import Comparison
from recipes.hub import hub_names
from recipes.launch import run
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
"""About 0.43 thousand million parameters, in bfloat16 0.86 GB."""
TINY = LlamaConfig(num_layers=1, width=8, num_heads=2, num_kv_heads=1, feed_forward_width=8, vocab_size=8)
LAYOUT = ParallelConfig()
PAGE_BYTES = 4096
THEIRS, OURS = "transformers from_pretrained", "ours"
AIM = 0.5
"""Largest share of their time."""


def write_folder(path: str) -> None:
    """Writes the folder that is imported; a rank of a job calls this.

    Args:
        path: The new folder; 1 GB must be free.
    """
    trained = _empty(MODEL, build_mesh(LAYOUT, "cpu"))
    for each in trained.named_parameters().values():
        local_part(each).uniform_(-1, 1)
    save_hub(path, trained, to_hub_config(MODEL), hub_names(MODEL).places(None))


def compare_import(num_rounds: int, path: str, num_ranks: int, *, cold: bool) -> tuple[Comparison, dict[str, int]]:
    """Times both from the first look at the folder until every page of every parameter was read and written.

    That is what the first step of training does; before it, `from_pretrained` has only mapped the files. Each import
    has processes of its own, whose memory nobody has used before. On several ranks, each has the whole model of
    transformers, and its part of ours under fully_shard.

    Args:
        num_rounds: Rounds.
        path: From `write_folder`.
        num_ranks: Ranks that import at the same time.
        cold: Drop the files from the page cache before each.

    Returns:
        The times, and by contender the peak of what rank 0 held beyond its libraries.
    """
    # Here, so that ranks, which are forked where that is possible, have it.
    _use_transformers()
    times_s: dict[str, list[float]] = {THEIRS: [], OURS: []}
    memory: dict[str, int] = {}
    for number in range(num_rounds):
        for name in (THEIRS, OURS) if number % 2 else (OURS, THEIRS):
            raw_files.set_cached(Path(path), not cold)
            time_s, num_bytes = run(import_on_rank, name, path, num_processes=num_ranks, debug=False)
            times_s[name].append(time_s)
            memory[name] = max(memory.get(name, 0), num_bytes)
    title = f"import of a Hugging Face folder, {'cold' if cold else 'warm'}, {num_ranks} ranks, bfloat16"
    return Comparison(title=title, times_s=times_s, targets={OURS: AIM}), memory


def import_on_rank(name: str, path: str) -> tuple[float, int]:
    """One import, by all ranks of a job.

    Args:
        name: `THEIRS` or `OURS`.
        path: The folder.

    Returns:
        Seconds until the last rank has its parameters, and bytes by which this rank's peak memory has grown.
    """
    mesh = build_mesh(LAYOUT, "cpu")
    # What a first model imports is not the import of a folder.
    if name == THEIRS:
        _use_transformers()
    else:
        _empty(TINY, mesh)
    cpu = torch.device("cpu")
    # Once for the pages of the files, once for those of the parameters.
    raw_files.refill_free_memory(2 * sum(file.stat().st_size for file in Path(path).iterdir()))
    # Linux starts the peak anew from what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes(cpu)
    dist.barrier()
    start_s = time.perf_counter()
    for values in _import_theirs(path) if name == THEIRS else _import_ours(path, mesh):
        values.view(-1)[:: PAGE_BYTES // values.itemsize].mul_(1)
    dist.barrier()
    # Linux counts pages in batches, so that a peak can seem to shrink by some.
    return time.perf_counter() - start_s, max(0, peak_bytes(cpu) - before)


def _use_transformers() -> None:
    """Makes a first model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
    transformers.AutoModelForCausalLM.from_config(config)


def _import_theirs(path: str) -> list[Tensor]:
    import transformers

    return [each.detach() for each in transformers.AutoModelForCausalLM.from_pretrained(path).parameters()]


def _import_ours(path: str, mesh: Mesh) -> list[Tensor]:
    config = from_hub_config(read_hub_config(path))
    trained = _empty(config, mesh)
    load_hub(path, trained, hub_names(config))
    return [local_part(each) for each in trained.named_parameters().values()]


def _empty(config: ModelConfig, mesh: Mesh) -> Trained:
    with torch.device("meta"):
        model = family_of(config).build(config).bfloat16()
    trained = parallelize(model, mesh, LAYOUT, family_of(config).plan(config))
    allocate(trained, clear=False)
    return trained
