"""How documents become samples, and what their simplest statistics are."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel.batch import IGNORE_INDEX
from recipes.data import (
    ByteTokenizer,
    DataConfig,
    PackedDataset,
    collate,
    load_dataset,
    text_entropy,
)
from tests.recipes.data_stores import byte_store

BOS, EOS, PAD = ByteTokenizer.bos, ByteTokenizer.eos, ByteTokenizer.pad


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def _packed(*texts: bytes, sequence_length: int, attend_across_documents: bool = False) -> PackedDataset:
    return PackedDataset(
        byte_store(*texts), sequence_length=sequence_length, attend_across_documents=attend_across_documents
    )


def test_the_tokenizer_gives_text_back_whatever_it_holds() -> None:
    tokenizer = ByteTokenizer()
    for text in ("", "plain", "naïve ß 漢字 🙂", "\x00\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(b"\xff\x00") == [255, 0]
    assert tokenizer.decode([BOS, 104, 105, EOS, PAD, 259]) == "hi"
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"


def test_samples_hold_tokens_labels_positions_and_documents_as_written_by_hand() -> None:
    dataset = _packed(b"abcd", b"e", sequence_length=4)
    ignore, (a, b, c, d, e) = IGNORE_INDEX, b"abcde"
    # The stream: bos a b c d eos bos e eos; its last eos is a label only.
    assert dataset.num_tokens == 9
    assert dataset.num_samples == 2
    first, second = dataset.sample(0), dataset.sample(1)
    assert first.tokens.tolist() == [BOS, a, b, c]
    assert first.labels.tolist() == [a, b, c, d]
    assert first.positions.tolist() == [0, 1, 2, 3]
    assert first.document_ids.tolist() == [0, 0, 0, 0]
    assert second.tokens.tolist() == [d, EOS, BOS, e]
    assert second.labels.tolist() == [EOS, ignore, e, EOS]
    assert second.positions.tolist() == [0, 1, 0, 1]
    assert second.document_ids.tolist() == [0, 0, 1, 1]


def test_the_last_sample_is_padded_with_ignored_tokens_of_no_document() -> None:
    sample = _packed(b"abc", sequence_length=3).sample(1)
    assert sample.tokens.tolist() == [ord("c"), EOS, PAD]
    assert sample.labels.tolist() == [EOS, IGNORE_INDEX, IGNORE_INDEX]
    assert sample.positions.tolist() == [0, 1, 0]
    assert sample.document_ids.tolist() == [0, 0, 1]


@pytest.mark.parametrize("sequence_length", [1, 2, 3, 7, 16, 100])
def test_each_byte_and_end_is_the_label_of_exactly_one_position(sequence_length: int) -> None:
    texts = [b"first", b"", b"a longer second one", b"3"]
    dataset = _packed(*texts, sequence_length=sequence_length)
    labels = np.concatenate([dataset.sample(index).labels for index in range(dataset.num_samples)])
    expected = [token for text in texts for token in [*text, EOS]]
    assert labels[labels != IGNORE_INDEX].tolist() == expected


def test_documents_that_may_see_each_other_have_no_ids_and_positions_run_on() -> None:
    dataset = _packed(b"ab", b"cd", sequence_length=7, attend_across_documents=True)
    batch = collate(dataset, [0], 1)
    assert batch.document_ids is None
    assert batch.positions.tolist() == [list(range(7))]
    assert batch.labels[0, 3] == IGNORE_INDEX


def test_a_batch_is_filled_up_with_rows_that_do_not_enter_the_loss() -> None:
    dataset = _packed(b"abcdefgh", sequence_length=4)
    batch = collate(dataset, [1], 3)
    assert batch.tokens.shape == (3, 4)
    assert batch.tokens.dtype == torch.int64
    assert batch.labels[0].tolist() == list(b"efgh")
    assert (batch.labels[1:] == IGNORE_INDEX).all()
    assert batch.num_valid_tokens == 4
    assert batch.document_ids is not None
    assert set(batch.document_ids.flatten().tolist()) == {0, 1}


def test_a_sample_out_of_range_is_an_index_error() -> None:
    dataset = _packed(b"abc", sequence_length=3)
    for index in (-1, 2):
        with pytest.raises(IndexError, match="of a dataset of 2"):
            dataset.sample(index)


def test_the_fingerprint_tells_texts_apart_and_borders_too() -> None:
    prints = {
        _packed(*texts, sequence_length=4).fingerprint for texts in [(b"abc",), (b"abd",), (b"ab", b"c"), (b"a", b"bc")]
    }
    assert len(prints) == 4
    assert _packed(b"abc", sequence_length=4).fingerprint == _packed(b"abc", sequence_length=2).fingerprint


def test_entropy_equals_a_count_by_hand() -> None:
    # Labels: a b a b eos; after bos: a; after a: b, b; after b: a, eos.
    entropy = text_entropy(_packed(b"abab", sequence_length=4))
    assert entropy.unigram == pytest.approx(-(0.4 * math.log(0.4) * 2 + 0.2 * math.log(0.2)))
    assert entropy.bigram == pytest.approx(2 / 5 * math.log(2))


def test_entropy_counts_pairs_across_pieces_but_none_across_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = _packed(b"to be or not", b"", b"to be", sequence_length=4)
    whole = text_entropy(dataset)
    monkeypatch.setattr("recipes.data.statistics._PIECE", 3)
    assert text_entropy(dataset) == pytest.approx(whole)
    # As often an a as an end.
    assert text_entropy(_packed(*[b"a"] * 9, sequence_length=4)) == pytest.approx((math.log(2), 0))


def test_binary_files_are_legal_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 2)
    data = load_dataset(DataConfig(source=str(tmp_path), sequence_length=32))
    assert data.held_out is not None
    assert data.held_out.num_tokens == 26 + 2


def test_nothing_is_held_out_when_none_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text " * 20)
    assert load_dataset(DataConfig(source=str(tmp_path), sequence_length=32, held_out_fraction=0)).held_out is None


def test_the_standard_library_loads_twice_the_same_and_repeats_some_of_its_bigrams() -> None:
    first, second = load_dataset(DataConfig()), load_dataset(DataConfig())
    assert first.train.fingerprint == second.train.fingerprint
    entropy = text_entropy(first.train)
    assert 3.0 < entropy.unigram < 3.5
    assert 2.2 < entropy.bigram < 2.7
