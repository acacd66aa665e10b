"""From a data config to the datasets of a run."""

import warnings
from typing import NamedTuple

from recipes.data.config import DataConfig, SourceConfig
from recipes.data.mixture import Dataset, MixedDataset
from recipes.data.packing import PackedDataset
from recipes.data.store import TokenStore
from recipes.data.tokens import SourceTokens, load_tokens


class SourceReport(NamedTuple):
    """What a source gave.

    Attributes:
        source: Its name.
        num_documents: Documents, held-out ones included.
        num_tokens: Tokens of them.
        num_skipped: Files and records left out because they cannot be used.
        first_skipped: Where and why the first of them was; empty if there was none.
        num_empty: Text files left out because they hold no text.
        num_cut: Chats that are longer than a sample and lose their end.
    """

    source: str
    num_documents: int
    num_tokens: int
    num_skipped: int
    first_skipped: str
    num_empty: int
    num_cut: int


class TextData(NamedTuple):
    """The text of a run.

    Attributes:
        train: What is trained on.
        held_out: What is evaluated on and never trained on, None where nothing is held out.
        reports: What each source gave.
    """

    train: Dataset
    held_out: Dataset | None
    reports: tuple[SourceReport, ...] = ()


def load_dataset(config: DataConfig) -> TextData:
    """The text of a config, packed; every rank calls this alone, and gets the same.

    Tokens are made once, see `recipes.data.cache`, and read as they are needed. Warns of what is left out.

    Args:
        config: Which text, and how it is cut.

    Raises:
        ValueError: If files are missing or cannot be used, the text to train on does not fill one sequence, or the
            cache cannot be written.
    """
    train, held_out, reports = [], [], []
    for source in config.sources:
        tokens = load_tokens(source, config)
        # Before the check, since it may be why there is little.
        _warn_of_skipped(source, tokens)
        _check_size(source, tokens.train, config)
        sides = [_packed(store, config) for store in (tokens.train, tokens.held_out) if store.num_documents]
        train.append(sides[0])
        held_out += sides[1:]
        reports.append(_report(source, tokens, sides))
        _warn_of_cut(reports[-1], config)
    return TextData(
        train=_mixed(train, [source.weight for source in config.sources]),
        # In proportion to its parts: each held-out sample comes once.
        held_out=_mixed(held_out, [part.num_samples for part in held_out]) if held_out else None,
        reports=tuple(reports),
    )


def _packed(store: TokenStore, config: DataConfig) -> PackedDataset:
    return PackedDataset(
        store,
        sequence_length=config.sequence_length,
        attend_across_documents=config.attend_across_documents,
    )


def _mixed(parts: list[PackedDataset], weights: list[float] | list[int]) -> Dataset:
    return parts[0] if len(parts) == 1 else MixedDataset(parts, weights)


def _check_size(source: SourceConfig, store: TokenStore, config: DataConfig) -> None:
    """Refuses what makes no sample to train on; chats need not fill one."""
    if store.num_documents and (store.learned is not None or store.num_tokens > config.sequence_length):
        return
    raise ValueError(
        f"too little text in {source.source!r}: {store.num_tokens} tokens to train on do not fill "
        f"one sequence of sequence_length={config.sequence_length} and the token after it; "
        "give more text or a shorter sequence_length"
    )


def _report(source: SourceConfig, tokens: SourceTokens, packed: list[PackedDataset]) -> SourceReport:
    stores = (tokens.train, tokens.held_out)
    return SourceReport(
        source=source.source,
        num_documents=sum(store.num_documents for store in stores),
        num_tokens=sum(store.num_tokens for store in stores),
        num_skipped=tokens.num_skipped,
        first_skipped=tokens.first_skipped,
        num_empty=tokens.num_empty,
        num_cut=sum(each.num_cut for each in packed),
    )


def _warn_of_skipped(source: SourceConfig, tokens: SourceTokens) -> None:
    if tokens.num_skipped:
        warnings.warn(
            f"{tokens.num_skipped} files and records of {source.source!r} are left out, since they cannot be used; "
            f"the first is {tokens.first_skipped}",
            stacklevel=3,
        )


def _warn_of_cut(report: SourceReport, config: DataConfig) -> None:
    if report.num_cut:
        warnings.warn(
            f"{report.num_cut} of {report.num_documents} chats of {report.source!r} are longer than "
            f"sequence_length={config.sequence_length} and lose their end",
            stacklevel=3,
        )
