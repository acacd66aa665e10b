"""Which text a recipe trains on, how it is cut, and in what order it comes."""

from dataclasses import dataclass

from recipes.checks import check_fraction, check_integer

PYTHON_STDLIB = "python-stdlib"
"""The source that every machine has: the `.py` files of the running Python's own standard library."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text a recipe trains on, how it is cut, and in what order it comes.

    Attributes:
        source: `python-stdlib` (the source of Python's own standard library, without site-packages and test
            folders), or the path of a text file or of a folder, which is read recursively, hidden folders left out.
        patterns: File names of a folder that are read, as shell patterns; `*` reads every file.
        held_out_fraction: Share of the files kept for evaluation, chosen by a hash of each file's relative name;
            of a single file its last bytes. 0 keeps none.
        sequence_length: Tokens of one sample; documents are joined and cut to this length.
        attend_across_documents: Let the documents that share a sample see each other; by default attention stays
            within a document and positions restart with it.
        seed: Seed of the order of samples, which is another one in every epoch.
    """

    source: str = PYTHON_STDLIB
    patterns: tuple[str, ...] = ("*.txt", "*.text", "*.md", "*.rst", "*.py")
    held_out_fraction: float = 0.05
    sequence_length: int = 256
    attend_across_documents: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks all that needs no file.

        Raises:
            ValueError: If a value is out of its range.
        """
        if not self.source.strip():
            raise ValueError(f"data source is empty; give {PYTHON_STDLIB!r}, or the path of a text file or folder")
        if not self.patterns or not all(self.patterns):
            raise ValueError(f"patterns={self.patterns!r} must name at least one file pattern, such as '*.txt' or '*'")
        if self.held_out_fraction == 1:
            raise ValueError("held_out_fraction=1 leaves no text to train on; it must be less than 1")
        check_fraction("held_out_fraction", self.held_out_fraction)
        check_integer("sequence_length", self.sequence_length, minimum=1)
        check_integer("seed", self.seed, minimum=0)
