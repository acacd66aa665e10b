"""Compares two checkpoints tensor by tensor."""

from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import tyro
from rich.console import RenderableType
from rich.table import Table
from torch import Tensor

from checkpoint.box_io import slabs
from checkpoint.boxes import whole
from checkpoint.canonical import MODEL_PREFIX
from checkpoint.hub.folder import is_hub_folder
from checkpoint.offline import SLAB_BYTES, Source, total_bytes
from checkpoint.random_state import CPU, CUDA
from checkpoint.sources import CheckpointSource
from recipes.checkpoints.report import DIFFERENT, Report, progress
from recipes.from_checkpoint import find_checkpoint
from recipes.hub import hub_source


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two tensors of one name are apart.

    Attributes:
        name: Their name.
        largest: max |a - b|; None where one is not a number and the other is.
        relative: That as a share of max |b|.
        num_different: Elements that differ in bits that count.
        num_elements: Elements of each.
    """

    name: str
    largest: float | None
    relative: float | None
    num_different: int
    num_elements: int


def compare(name: str, a: Source, b: Source) -> Difference:
    """Compares two tensors of the same shape, some MiB at a time.

    Args:
        name: Their name.
        a: Holds one.
        b: Holds the other.
    """
    dtype, shape = a.tensors[name]
    largest, scale, num_different = 0.0, 0.0, 0
    for box, _ in slabs(whole(shape), torch.empty(shape, dtype=dtype, device="meta"), SLAB_BYTES):
        one, other = a.read(name, box).double(), b.read(name, box).double()
        differs = ~((one == other) | (one.isnan() & other.isnan()))
        if differs.any():
            num_different += int(differs.sum())
            # Infinities of one sign are equal, and their difference is none.
            largest = max(largest, _largest((one - other)[differs]))
        scale = max(scale, _largest(other))
    is_number = largest < float("inf")
    return Difference(
        name=name,
        largest=largest if is_number else None,
        relative=largest / scale if is_number and 0 < scale < float("inf") else None,
        num_different=num_different,
        num_elements=int(torch.Size(shape).numel()),
    )


def _largest(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    return float(values.abs().nan_to_num(nan=float("inf")).max())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How two sets of tensors differ.

    Attributes:
        only_a: Names that one of them has alone.
        only_b: Names that the other has alone.
        shapes: Names whose shapes differ; their values are not compared.
        dtypes: Names whose dtypes differ.
        of_other_ranks: States of random-number generators where the two hold those of another number of ranks, none of
            which has its like in the other; not compared, and no difference.
        num_equal: Tensors whose values are equal.
        differences: Those whose values differ, the farthest apart first.
    """

    only_a: list[str]
    only_b: list[str]
    shapes: list[str]
    dtypes: list[str]
    of_other_ranks: list[str]
    num_equal: int
    differences: list[Difference]

    @property
    def is_different(self) -> bool:
        """Whether anything differs."""
        return bool(self.only_a or self.only_b or self.shapes or self.dtypes or self.differences)

    def shown(self, num_listed: int) -> list[RenderableType]:
        """The comparison for people.

        Args:
            num_listed: How many names of a kind, and of the largest differences, to list.
        """
        headings = {
            "only in a": self.only_a,
            "only in b": self.only_b,
            "of another shape": self.shapes,
            "of another dtype": self.dtypes,
            "not compared, of another number of ranks, no difference": self.of_other_ranks,
        }
        shown: list[RenderableType] = []
        for what, names in headings.items():
            if names:
                more = [f"... and {len(names) - num_listed:,} more"] if len(names) > num_listed else []
                shown.append("\n  ".join([f"{what} ({len(names):,}):", *names[:num_listed], *more]))
        if self.differences:
            table = Table("tensor", "max |a - b|", "of max |b|", "elements that differ", title="largest differences")
            for each in self.differences[:num_listed]:
                largest, relative = (
                    "not a number" if value is None else f"{value:.3g}" for value in (each.largest, each.relative)
                )
                table.add_row(each.name, largest, relative, f"{each.num_different:,} of {each.num_elements:,}")
            shown.append(table)
        return [*shown, f"{self.num_equal} tensors are equal, {len(self.differences)} differ in values"]


def compare_all(a: Source, b: Source, prefix: str = "") -> Comparison:
    """Compares all tensors whose names begin alike; shows how far it has come.

    Args:
        a: One set of tensors.
        b: The other.
        prefix: How their names begin.
    """
    apart = _of_other_ranks(a, b)
    of_a, of_b = ([name for name in each.tensors if name.startswith(prefix) and name not in apart] for each in (a, b))
    common = [name for name in of_a if name in b.tensors]
    shapes = [name for name in common if a.tensors[name][1] != b.tensors[name][1]]
    found: list[Difference] = []
    with progress("compare", total_bytes(a)) as advance:
        for name in common:
            if name not in shapes:
                found.append(compare(name, a, b))
                advance(found[-1].num_elements * a.tensors[name][0].itemsize)
    return Comparison(
        only_a=[name for name in of_a if name not in b.tensors],
        only_b=[name for name in of_b if name not in a.tensors],
        shapes=shapes,
        dtypes=[name for name in common if a.tensors[name][0] != b.tensors[name][0]],
        of_other_ranks=[name for name in apart if name.startswith(prefix)],
        num_equal=sum(not each.num_different for each in found),
        differences=sorted(
            (each for each in found if each.num_different),
            key=lambda each: float("inf") if each.largest is None else each.largest,
            reverse=True,
        ),
    )


def _of_other_ranks(a: Source, b: Source) -> list[str]:
    """Names of generators' states, of which there is a row for each rank, if the numbers of ranks differ."""
    is_other = CPU in a.tensors and CPU in b.tensors and a.tensors[CPU][1] != b.tensors[CPU][1]
    return [name for name in (CPU, CUDA) if is_other and (name in a.tensors or name in b.tensors)]


def open_source(path: str) -> Source:
    """The tensors of a checkpoint or of a Hugging Face folder under our names.

    Args:
        path: One of them, or a folder of checkpoints or of a run, of which the newest is taken.

    Raises:
        ValueError: If there is none.
    """
    found = find_checkpoint(path)
    return hub_source(found)[0] if is_hub_folder(found) else CheckpointSource(found)


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compares two checkpoints, or Hugging Face folders: their tensors, and how far apart values are.

    States of random-number generators of another number of ranks are named apart: they are no difference.

    Attributes:
        a: One of them.
        b: The other.
        model: Compare parameters of the model alone.
        largest: How many of the largest differences, and names of a kind, to list; JSON has all.
        json: Print JSON.
        debug: Show the traceback of an error.
    """

    a: Annotated[str, tyro.conf.Positional]
    b: Annotated[str, tyro.conf.Positional]
    model: bool = False
    largest: int = 10
    json: bool = False
    debug: bool = False

    def run(self) -> Report:
        """Reads both."""
        a, b = open_source(self.a), open_source(self.b)
        found = compare_all(a, b, MODEL_PREFIX if self.model else "")
        exit_code = DIFFERENT if found.is_different else 0
        return Report(values=asdict(found), shown=found.shown(self.largest), exit_code=exit_code)
