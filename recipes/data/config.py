"""Which text a recipe trains on, how it is cut, and in what order it comes."""

from dataclasses import dataclass, field, fields
from typing import Literal

from recipes.checks import check_fraction, check_integer, check_number

PYTHON_STDLIB = "python-stdlib"
"""The source that every machine has: the `.py` files of the running Python's own standard library."""

FORMATS = ("auto", "text", "jsonl", "parquet")
RECORDS = ("text", "chat")
CHAT_TEMPLATES = ("plain", "chatml")
ON_ERROR = ("raise", "skip")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where text comes from, and how it is read.

    Attributes:
        source: `python-stdlib` (the source of Python's own standard library, without site-packages and test
            folders), or the path of a file or of a folder, which is read recursively, hidden folders left out.
        patterns: File names of a folder that are read, as shell patterns; `*` reads every file.
        format: `text` (a file is a document), `jsonl` (a line is a JSON object and a document) or `parquet` (a row
            is a document); `auto` tells by the end of the file names, where .jsonl, .ndjson and .parquet say so.
        record: What a line of JSONL or a row of parquet holds: `text`, or `chat`: either `messages`, a list of
            {`role`, `content`}, or `prompt` and `completion`. Of a chat the model learns only what the assistant says
            and the token that ends it; `prompt` and `completion` are joined as they are, without a template.
        text_field: The field of a record that holds its text.
        chat_template: How `messages` become one text, see `recipes.data.chat`: `plain` for any tokenizer, `chatml`
            for those that have <|im_start|> and <|im_end|>.
        held_out_fraction: Share kept for evaluation; 0 keeps none. Of text it is a share of the files, chosen by a
            hash of each file's relative name, and of a single file its last bytes. Of JSONL and parquet it is a share
            of the records, chosen by a hash of what they hold, so that equal ones stay on one side.
    """

    source: str = PYTHON_STDLIB
    patterns: tuple[str, ...] = ("*.txt", "*.text", "*.md", "*.rst", "*.py", "*.jsonl", "*.ndjson", "*.parquet")
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    record: Literal["text", "chat"] = "text"
    text_field: str = "text"
    chat_template: Literal["plain", "chatml"] = "plain"
    held_out_fraction: float = 0.05

    def __post_init__(self) -> None:
        """Checks all that needs no file.

        Raises:
            ValueError: If a value is out of its range.
        """
        if not self.source.strip():
            raise ValueError(f"data source is empty; give {PYTHON_STDLIB!r}, or the path of a file or folder")
        if not self.patterns or not all(self.patterns):
            raise ValueError(f"patterns={self.patterns!r} must name at least one file pattern, such as '*.txt' or '*'")
        if not self.text_field:
            raise ValueError("text_field is empty; name the field of a record that holds its text, such as 'text'")
        for name, legal in (("format", FORMATS), ("record", RECORDS), ("chat_template", CHAT_TEMPLATES)):
            _check_choice(name, getattr(self, name), legal)
        if self.record == "chat" and self.format == "text":
            raise ValueError("record='chat' needs records, but format='text'; use format 'jsonl' or 'parquet'")
        if self.held_out_fraction == 1:
            raise ValueError("held_out_fraction=1 leaves no text to train on; it must be less than 1")
        check_fraction("held_out_fraction", self.held_out_fraction)


@dataclass(frozen=True, kw_only=True)
class WeightedSource(SourceConfig):
    """One source of a mixture.

    Attributes:
        weight: Its share of the samples, relative to the weights of the other sources.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        """Checks the weight too.

        Raises:
            ValueError: If a value is out of its range.
        """
        super().__post_init__()
        check_number("weight", self.weight, above=0)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens.

    Attributes:
        file: A `tokenizer.json` as Hugging Face writes it, or a folder that holds one; None: one token a byte.
        bos: The token put before each document; "": none; None: the one that `tokenizer_config.json` beside the file
            names, or else one of the usual names; none where that is the eos too.
        eos: The token put after each document; None: found in the same way.
    """

    file: str | None = None
    bos: str | None = None
    eos: str | None = None

    def __post_init__(self) -> None:
        """Checks what needs no file.

        Raises:
            ValueError: If bos or eos is given for bytes, or eos is empty.
        """
        if self.file is None and (self.bos is not None or self.eos is not None):
            raise ValueError("tokenizer bos and eos belong to a tokenizer file; bytes have their own: give a file too")
        if self.file == "":
            raise ValueError("tokenizer file is empty; give the path of a tokenizer.json, or leave it out for bytes")
        if self.eos == "":
            raise ValueError("tokenizer eos is empty; every document needs a token that ends it")


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """Which text a recipe trains on, how it is cut, and in what order it comes.

    Attributes:
        mixture: Several sources, mixed by weight, instead of the one that `source` and the fields with it describe;
            see `recipes.data.mixture` for what an epoch is then. All that is held out is evaluated on, unweighted.
        tokenizer: How text becomes tokens.
        sequence_length: Tokens of one sample; documents of text are joined and cut to this length, chats are joined
            as far as they fit whole.
        attend_across_documents: Let the documents that share a sample see each other; by default attention stays
            within a document and positions restart with it.
        seed: Seed of the order of samples, which is another one in every epoch.
        on_error: What happens to files and records that cannot be used, such as a broken line: `raise` stops with an
            error that names the first, `skip` leaves them out and warns of their number.
        max_record_bytes: A line of JSONL or a text of parquet that is longer cannot be used.
        cache: Folder of the tokens, which are made once and read from there by every later run and rank; None:
            meshwright/tokens in $XDG_CACHE_HOME or else in ~/.cache. It may be removed at any time.
    """

    mixture: tuple[WeightedSource, ...] = ()
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    sequence_length: int = 256
    attend_across_documents: bool = False
    seed: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    max_record_bytes: int = 16 << 20
    cache: str | None = None

    def __post_init__(self) -> None:
        """Checks all that needs no file.

        Raises:
            ValueError: If a value is out of its range, or does not go with another.
        """
        super().__post_init__()
        check_integer("sequence_length", self.sequence_length, minimum=1)
        check_integer("seed", self.seed, minimum=0)
        check_integer("max_record_bytes", self.max_record_bytes, minimum=1)
        _check_choice("on_error", self.on_error, ON_ERROR)
        if self.cache is not None and not self.cache.strip():
            raise ValueError("cache is empty; name a folder for tokens, or leave it out for the usual one")
        if self.mixture:
            own = [each.name for each in fields(SourceConfig) if getattr(self, each.name) != each.default]
            if own:
                raise ValueError(f"{', '.join(own)} and mixture are both given; say it of each source of the mixture")
        for source in self.sources:
            if source.record == "chat" and source.chat_template == "chatml" and self.tokenizer.file is None:
                raise ValueError(
                    "chat_template='chatml' needs the tokens <|im_start|> and <|im_end|>, which bytes do not have; "
                    "use 'plain', or a tokenizer file that has them"
                )

    @property
    def sources(self) -> tuple[WeightedSource, ...]:
        """All sources: those of the mixture, or the one that the config's own fields describe."""
        own = {each.name: getattr(self, each.name) for each in fields(SourceConfig)}
        return self.mixture or (WeightedSource(**own),)


def _check_choice(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"unknown {name} {value!r}; legal: {', '.join(legal)}")
