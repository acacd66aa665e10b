"""The manifest's table of tensors: how each is written, and read without trust in it."""

from collections.abc import Mapping
from math import prod

from checkpoint.fields import Fields
from checkpoint.layout import Axes, Layout
from checkpoint.owners import StoredTensor
from checkpoint.safetensors_header import CODES, MAX_DIMS, MAX_ELEMENTS
from checkpoint.strict_json import Json

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


def tensor_json(tensor: StoredTensor, meshes: Mapping[Axes, int]) -> Json:
    """A tensor as the table has it.

    Args:
        tensor: The tensor.
        meshes: Mesh -> its number in the manifest.
    """
    layout = tensor.layout
    described: dict[str, Json] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "mesh": meshes[layout.mesh],
    }
    if layout.splits:
        described["splits"] = [[axis, dim] for axis, dim in layout.splits]
    if layout.at:
        described["at"] = dict(layout.at)
    return described


def read_mesh(value: Json, where: str, world_size: int) -> Axes:
    """A mesh that tensors lie on.

    Args:
        value: Axis -> ranks along it.
        where: The manifest's path, for messages.
        world_size: Ranks of the job.

    Raises:
        ValueError: If it is no mesh of as many ranks.
    """
    reader = Fields({"mesh": value}, where)
    mesh = reader.counts_by_name("mesh")
    # One by one, because a product of thousands of factors takes its time.
    size = 1
    for _, each in mesh:
        size *= each
        if not 1 <= size <= world_size:
            break
    if size != world_size:
        raise ValueError(f"{where}: the mesh {dict(mesh[:9])} must hold {world_size} ranks")
    return mesh


def read_tensors(table: Fields, meshes: list[Axes]) -> dict[str, StoredTensor]:
    """All tensors of the table.

    Args:
        table: Name -> tensor.
        meshes: The manifest's meshes.

    Raises:
        ValueError: If one cannot be; the message names it.
    """
    # Most tensors share one of a few layouts, and are then as quick to use as to read.
    layouts: dict[str, Layout] = {}
    return {name: _read_tensor(table.sub(name), meshes, layouts) for name in table.value}


def _read_tensor(reader: Fields, meshes: list[Axes], layouts: dict[str, Layout]) -> StoredTensor:
    dtype, shape = reader.get("dtype", str), reader.counts("shape")
    if dtype not in DTYPES:
        raise ValueError(f"{reader.where} has dtype {dtype!r}; legal: {', '.join(DTYPES)}")
    if len(shape) > MAX_DIMS or prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise ValueError(f"{reader.where} has shape {list(shape[:9])}, larger than any tensor")
    written = repr([reader.value.get(name) for name in ("mesh", "splits", "at")])
    if written not in layouts:
        layouts[written] = _read_layout(reader, meshes)
    layout = layouts[written]
    if any(dim >= len(shape) for _, dim in layout.splits):
        raise ValueError(f"{reader.where} of shape {list(shape)} is cut where it has no dim or rank: {layout}")
    return StoredTensor(dtype=DTYPES[dtype], shape=shape, layout=layout)


def _read_layout(reader: Fields, meshes: list[Axes]) -> Layout:
    mesh = reader.count("mesh")
    if mesh >= len(meshes):
        raise ValueError(f"{reader.where} lies on mesh {mesh}, but there are {len(meshes)}")
    layout = Layout(mesh=meshes[mesh], splits=reader.pairs("splits"), at=reader.counts_by_name("at"))
    axes = [axis for axis, _ in (*layout.splits, *layout.at)]
    if len(set(axes)) < len(axes) or not set(axes) <= layout.sizes.keys():
        raise ValueError(f"{reader.where} is cut along {axes}; each axis of {list(layout.sizes)} can cut once")
    if any(at >= layout.sizes[axis] for axis, at in layout.at):
        raise ValueError(f"{reader.where} is cut where it has no dim or rank: {layout}")
    return layout
