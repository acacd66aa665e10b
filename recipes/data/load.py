"""From a data config to the datasets of a run."""

from typing import NamedTuple

from recipes.data.config import DataConfig
from recipes.data.documents import read_documents
from recipes.data.packing import PackedDataset


class TextData(NamedTuple):
    """The text of a run.

    Attributes:
        train: What is trained on.
        held_out: What is evaluated on and never trained on, None where nothing is held out.
    """

    train: PackedDataset
    held_out: PackedDataset | None


def load_dataset(config: DataConfig) -> TextData:
    """Reads and packs the text of a config; every rank does so alone, with the same result.

    Args:
        config: Which text, and how it is cut.

    Raises:
        ValueError: If files are missing or unreadable, or the text to train on does not fill one sequence.
    """
    documents, held_out_documents = read_documents(config)
    train, held_out = (
        PackedDataset(
            each,
            sequence_length=config.sequence_length,
            attend_across_documents=config.attend_across_documents,
        )
        if each
        else None
        for each in (documents, held_out_documents)
    )
    if train is None or train.num_tokens <= config.sequence_length:
        raise ValueError(
            f"too little text in {config.source!r}: {train.num_tokens if train else 0} tokens to train on do not fill "
            f"one sequence of sequence_length={config.sequence_length} and the token after it; "
            "give more text or a shorter sequence_length"
        )
    return TextData(train, held_out)
