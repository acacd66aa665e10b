"""Measures what a save and a load cost one rank of a thousand, without the others."""

import time

import torch

from checkpoint.boxes import whole
from checkpoint.layout import Layout, replicated
from checkpoint.manifest import Header, Manifest, StoredFile, file_name
from checkpoint.owners import Owners, StoredTensor
from recipes.bench.aims import Aim

NUM_RANKS, NUM_TENSORS = 1024, 1000
MESH = (("dp_replicate", 4), ("fsdp", 64), ("tp", 4))
PLAN_S, MANIFEST_BYTES = 2.0, 10_000_000


def plan_of_many_ranks() -> list[Aim]:
    """Plans a save of 1,000 tensors on 1,024 ranks and a load of it on 512, as one rank does."""
    tensors = {f"model.norm.{number}": _stored((8192,), ()) for number in range(NUM_TENSORS // 4)}
    tensors |= {f"model.up.{number}": _stored((8192, 8192), (0,)) for number in range(NUM_TENSORS // 2)}
    tensors |= {f"model.down.{number}": _stored((8192, 8192), (1,)) for number in range(NUM_TENSORS // 4 - 1)}
    tensors["optimizer.step"] = StoredTensor(dtype=torch.float32, shape=(), layout=replicated(NUM_RANKS))
    start_s = time.process_time()
    Owners(tensors).of_rank(NUM_RANKS * 3 // 4)
    save_s = time.process_time() - start_s
    files = {file_name(rank): StoredFile(num_bytes=1 << 40, digest="0" * 16) for rank in range(NUM_RANKS)}
    text = Manifest(header=Header(step=1, num_tokens=1, world_size=NUM_RANKS), tensors=tensors, files=files).to_text()
    start_s = time.process_time()
    owners, now = Owners(Manifest.from_text(text.encode(), "a plan").tensors), Layout((("fsdp", 512),), (("fsdp", 0),))
    for name, tensor in tensors.items():
        box = now.box(tensor.shape, {"fsdp": 300}) if tensor.shape else whole(())
        for _ in owners.overlapping(name, box):
            pass
    load_s = time.process_time() - start_s
    what = f"{NUM_RANKS:,} ranks x {NUM_TENSORS:,} tensors"
    return [
        Aim(what=f"plan of a save, {what}, on a rank", value=save_s, limit=PLAN_S, unit="s"),
        Aim(what=f"plan of a load on 512 ranks, {what}, on a rank", value=load_s, limit=PLAN_S, unit="s"),
        Aim(what=f"manifest, {what}", value=len(text.encode()), limit=MANIFEST_BYTES, unit="bytes"),
    ]


def _stored(shape: tuple[int, ...], tp_dim: tuple[int, ...]) -> StoredTensor:
    splits = (*(("tp", dim) for dim in tp_dim), ("fsdp", 0))
    return StoredTensor(dtype=torch.float32, shape=shape, layout=Layout(MESH, splits))
