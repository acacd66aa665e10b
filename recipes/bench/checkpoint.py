"""Measures saving and loading: ours beside torch's own storage, and beside plain writes and reads of the same bytes."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from checkpoint import BackgroundSaver, ShardReader, TrainState, load, save
from checkpoint.boxes import chunk
from checkpoint.reader import Slice
from checkpoint.shard_file import memory_of
from checkpoint.state import flatten
from models.llama import Llama, LlamaConfig, llama_plan
from parallel import ParallelConfig, build_mesh, materialize, parallelize
from parallel.replicas import local_part
from recipes.bench import raw_files
from recipes.bench.aims import Aim
from recipes.bench.rounds import Comparison, interleave
from recipes.metrics import peak_bytes

MODEL = LlamaConfig(num_layers=21, width=576, num_heads=9, num_kv_heads=3, feed_forward_width=1536, vocab_size=8192)
"""With two moments of AdamW 576 tensors of 1 GB, and 192 counts of steps."""
TORCH, OURS = "torch, one thread", "ours"
AIM = 0.5
"""Largest share of torch's time."""
MEMORY_AIM = 64 << 20
"""Most bytes of a rank."""


def compare_save(num_rounds: int, folder: str) -> Comparison:
    """Saves of a state of 1 GB, synced, by all ranks.

    Args:
        num_rounds: Rounds.
        folder: Where to write; 4 GB must be free.
    """
    bench = SavedState(folder)
    contenders: dict[str, Callable[[], object]] = {TORCH: bench.save_torch, OURS: bench.save_ours}
    contenders |= {name: partial(bench.write_raw, write) for name, write in raw_files.WRITES.items()}

    def prepare() -> None:
        bench.clear()
        bench.refill_free_memory()

    times_s = interleave(contenders, num_rounds=num_rounds, steps_of_a_round=1, prepare=prepare)
    return Comparison(title=f"save, {bench.describe()}", times_s=times_s, targets={OURS: AIM})


def compare_load(num_rounds: int, folder: str, cold: bool) -> Comparison:
    """Loads of that state into one that is there, by all ranks.

    Args:
        num_rounds: Rounds.
        folder: Where to write first what is loaded.
        cold: Whether the files are dropped from the page cache before each load.
    """
    bench = SavedState(folder)
    bench.clear()
    bench.save_torch()
    bench.save_ours()
    bench.write_raw(raw_files.write_buffered)
    contenders: dict[str, Callable[[], object]] = {TORCH: bench.load_torch, OURS: bench.load_ours}
    contenders |= {name: partial(bench.read_raw, read) for name, read in raw_files.READS.items()}

    def prepare() -> None:
        raw_files.set_cached(bench.folder, not cold)
        bench.refill_free_memory()

    times_s = interleave(contenders, num_rounds=num_rounds, steps_of_a_round=1, prepare=prepare)
    title = f"load, {'cold' if cold else 'warm'}, {bench.describe()}"
    return Comparison(title=title, times_s=times_s, targets={OURS: AIM})


def memory_of_save_and_load(folder: str) -> list[Aim]:
    """Bytes that a save and a load add to the peak memory of rank 0.

    Args:
        folder: Where to write.
    """
    bench = SavedState(folder)
    bench.clear()
    added = {"a save": _added(bench.save_ours), "a load": _added(bench.load_ours)}
    with BackgroundSaver(bench.folder / "ours") as saver:
        saver.save(bench.state)
        saver.finish()
        added["a save in the background after the first"] = _added(partial(saver.save, bench.state))
    return [
        Aim(
            what=f"memory for {what} beside the state, {dist.get_world_size()} ranks",
            value=num_bytes,
            limit=MEMORY_AIM,
            unit="bytes",
        )
        for what, num_bytes in added.items()
    ]


def bytes_moved(folder: str) -> list[Aim]:
    """How evenly ranks write, and how little more than it needs a rank reads of a checkpoint of other shards.

    Args:
        folder: Where to write.
    """
    bench = SavedState(folder)
    bench.clear()
    path = save(bench.folder / "ours", bench.state)
    dist.barrier()
    reader = ShardReader(path)
    written = [each.num_bytes for each in reader.manifest.files.values()]
    slices = [
        Slice(name, (first, *(0 for _ in tensor.shape[1:])), torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype))
        for name, tensor in reader.manifest.tensors.items()
        if tensor.shape
        for first, rows in [chunk(tensor.shape[0], 3, 1)]
    ]
    reads = reader.prepare(slices)
    needed, ranks = sum(each.out.nbytes for each in slices), f"{dist.get_world_size()} ranks"
    return [
        Aim(
            what=f"bytes of the busiest of {ranks}, of the mean",
            value=max(written) * len(written) / sum(written),
            limit=1.05,
        ),
        Aim(
            what=f"bytes read by one of 3 row shards from {ranks}, of its own",
            value=reads.file_bytes / needed,
            limit=1.05,
        ),
    ]


def _added(action: Callable[[], object]) -> int:
    cpu = torch.device("cpu")
    # Linux starts the peak anew from what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes(cpu)
    action()
    return peak_bytes(cpu) - before


class SavedState:
    """A training state of fully_shard on all ranks, and the ways to write and read it."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.folder = Path(folder)
        self.state = _new_state()
        tensors = flatten(self.state, dist.get_world_size()).tensors
        # Torch's own save in the background would copy gradients too.
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.raw_file = self.folder / f"raw-{dist.get_rank()}"
        self.local = [each for each in map(local_part, self.tensors.values()) if each.numel()]
        self.views = [memory_of(each) for each in self.local]

    def describe(self) -> str:
        """What is saved, in words."""
        num_bytes = sum(each.nbytes for each in self.tensors.values())
        return f"{num_bytes / 1e9:.2f} GB in {len(self.tensors)} tensors, {dist.get_world_size()} ranks"

    def clear(self) -> None:
        """Leaves nothing of the contender before, on the disk or on its way there."""
        if dist.get_rank() == 0:
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()

    def refill_free_memory(self) -> None:
        """Gives every contender the same memory to find: what this rank's part takes in the page cache."""
        dist.barrier()
        raw_files.refill_free_memory(sum(map(len, self.views)))

    def save_ours(self) -> None:
        """Our save."""
        save(self.folder / "ours", self.state)

    def load_ours(self) -> None:
        """Our load, of the newest."""
        load(self.folder / "ours", self.state)

    def save_torch(self) -> None:
        """Torch's save."""
        dcp.save(dict(self.tensors), storage_writer=FileSystemWriter(self.folder / "torch"))

    def load_torch(self) -> None:
        """Torch's load."""
        dcp.load(dict(self.tensors), storage_reader=FileSystemReader(self.folder / "torch"))

    def write_raw(self, write: raw_files.Action) -> None:
        """The same bytes without a format."""
        write(self.raw_file, self.views)
        dist.barrier()

    def read_raw(self, read: raw_files.Action) -> None:
        """Those bytes back."""
        read(self.raw_file, self.views)
        dist.barrier()


def _new_state() -> TrainState:
    config = ParallelConfig()
    mesh = build_mesh(config, "cpu")
    with torch.device("meta"):
        model = Llama(MODEL)
    trained = parallelize(model, mesh, config, llama_plan(MODEL))
    materialize(trained)
    optimizer = trained.build_optimizer(lambda named: torch.optim.AdamW(named.values(), fused=True))
    for parameter in trained.named_parameters().values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(trained=trained, optimizer=optimizer)
