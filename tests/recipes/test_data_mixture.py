"""What an epoch of several sources holds, and how it resumes."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.data import (
    DataConfig,
    Dataset,
    DataStream,
    MixedDataset,
    PackedDataset,
    WeightedSource,
    evaluation_batches,
    load_dataset,
    text_entropy,
)
from tests.recipes.data_stores import byte_store, write_lines

LENGTH = 4


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def _part(num_samples: int, byte: int) -> PackedDataset:
    return PackedDataset(byte_store(bytes([byte]) * (num_samples * LENGTH - 1)), sequence_length=LENGTH)


def _mixed(sizes: Sequence[int] = (6, 10, 4), weights: Sequence[float] = (2, 1, 1)) -> MixedDataset:
    return MixedDataset([_part(size, 97 + number) for number, size in enumerate(sizes)], weights)


def _by_part(dataset: MixedDataset, ids: Sequence[int]) -> list[list[int]]:
    """Sample numbers within each part, in the order in which they come."""
    borders = [0, *itertools.accumulate(part.num_samples for part in dataset.parts)]
    return [[each - start for each in ids if start <= each < end] for start, end in itertools.pairwise(borders)]


def _streams(dp_degree: int, dataset: Dataset, seed: int = 0) -> list[DataStream]:
    return [
        DataStream(dataset, global_batch=6, micro_batch=2, dp_rank=rank, dp_degree=dp_degree, seed=seed)
        for rank in range(dp_degree)
    ]


def _step(streams: Sequence[DataStream]) -> list[int]:
    for stream in streams:
        stream.next_step()
    columns = itertools.zip_longest(*(stream.last_sample_ids for stream in streams))
    return [sample for column in columns for sample in column if sample is not None]


@pytest.mark.parametrize(
    ("sizes", "weights", "expected"),
    [
        ((6, 10, 4), (2, 1, 1), [10, 5, 5]),
        ((6, 10, 4), (0.5, 0.25, 0.25), [10, 5, 5]),
        ((10, 10), (0.7, 0.3), [14, 6]),
        ((6, 10, 4), (6, 10, 4), [6, 10, 4]),
        ((5, 5), (2, 1), [7, 3]),
        ((4, 3), (1, 1), [4, 3]),
        ((3, 97), (0.9, 0.1), [90, 10]),
        ((5, 5), (1.5e308, 1e308), [6, 4]),
        ((5, 5), (3e-320, 2e-320), [6, 4]),
    ],
)
def test_an_epoch_takes_of_each_source_its_share_to_the_sample(
    sizes: Sequence[int], weights: Sequence[float], expected: Sequence[int]
) -> None:
    dataset = _mixed(sizes, weights)
    for epoch in range(3):
        order = dataset.order(5, epoch).tolist()
        assert len(order) == sum(sizes) == dataset.num_samples
        assert [len(each) for each in _by_part(dataset, order)] == expected


def test_each_source_is_gone_through_pass_after_pass_across_epochs() -> None:
    dataset = _mixed()
    ids = [sample for epoch in range(8) for sample in dataset.order(3, epoch).tolist()]
    for part, taken in zip(dataset.parts, _by_part(dataset, ids), strict=True):
        size = part.num_samples
        passes = [taken[start : start + size] for start in range(0, len(taken), size)]
        assert len(passes) > 3
        for each in passes[:-1]:
            assert sorted(each) == list(range(size))
        assert len(set(passes[-1])) == len(passes[-1])
        assert len({tuple(each) for each in passes[:-1]}) > len(passes) // 2


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    dataset = _mixed((30, 30), (1, 1))
    one, other = _by_part(dataset, dataset.order(0, 0).tolist())
    assert one != other


def test_the_order_of_a_seed_never_changes() -> None:
    assert _mixed().order(7, 1).tolist() == [0, 8, 9, 3, 18, 17, 12, 1, 10, 2, 4, 3, 0, 19, 5, 17, 2, 18, 0, 15]


def test_samples_are_those_of_the_parts_one_part_after_the_other() -> None:
    dataset = _mixed()
    samples = [part.sample(index) for part in dataset.parts for index in range(part.num_samples)]
    for index, expected in enumerate(samples):
        for got, field in zip(dataset.sample(index), expected, strict=True):
            assert got.tolist() == field.tolist()
    for index in (-1, 20):
        with pytest.raises(IndexError, match="of a dataset of 20"):
            dataset.sample(index)


@pytest.mark.parametrize("dp_degree", [1, 2, 3, 4])
def test_the_samples_of_a_step_are_the_same_on_every_mesh(dp_degree: int) -> None:
    dataset = _mixed()
    reference, streams = _streams(1, dataset), _streams(dp_degree, dataset)
    for _ in range(9):
        assert _step(streams) == _step(reference)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 3)])
@pytest.mark.parametrize("num_steps", [2, 4, 9])
def test_a_mixture_resumes_at_the_same_sample_with_another_data_parallel_degree(
    before: int, after: int, num_steps: int
) -> None:
    # Four steps an epoch: within the first, at its end, within the third.
    reference, streams = _streams(1, _mixed()), _streams(before, _mixed())
    for _ in range(num_steps):
        assert _step(streams) == _step(reference)
    resumed = _streams(after, _mixed())
    for stream in resumed:
        stream.load_state_dict(streams[-1].state_dict())
    for _ in range(6):
        assert _step(resumed) == _step(reference)


def test_the_position_of_another_mixture_is_refused() -> None:
    state = _streams(1, _mixed())[0].state_dict()
    others: list[Dataset] = [
        _mixed(weights=(2, 1, 2)),
        _mixed(sizes=(7, 9, 4)),
        _mixed((10, 6, 4), (1, 2, 1)),
        _part(20, 97),
    ]
    others.append(MixedDataset([_part(6, 97), _part(10, 98), _part(4, 120)], (2, 1, 1)))
    for other in others:
        with pytest.raises(ValueError, match=r"the data differ .*fingerprint"):
            _streams(1, other)[0].load_state_dict(state)
    # The same shares, said in other numbers.
    _streams(1, _mixed(weights=(0.5, 0.25, 0.25)))[0].load_state_dict(state)


def test_a_weight_of_less_than_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight=0\.001 of source 1 .* less than one of the 20 samples"):
        _mixed(weights=(1, 0.001, 1))


def test_parts_that_are_cut_otherwise_are_refused() -> None:
    other = PackedDataset(byte_store(b"text" * 9), sequence_length=8)
    with pytest.raises(ValueError, match="one sequence_length"):
        MixedDataset([_part(4, 97), other], [1, 1])


def _config(folder: Path) -> DataConfig:
    (folder / "texts").mkdir()
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text("text " * 50)
    lines = write_lines(folder / "a.jsonl", [{"text": f"line {number} of many"} for number in range(60)])
    pairs = [{"prompt": "p", "completion": f"answer {number}"} for number in range(30)]
    chats = write_lines(folder / "chats.jsonl", pairs)
    return DataConfig(
        mixture=(
            WeightedSource(source=str(folder / "texts"), weight=3, held_out_fraction=0.25),
            WeightedSource(source=lines, weight=1, held_out_fraction=0),
            WeightedSource(source=chats, weight=1, record="chat", held_out_fraction=0.2),
        ),
        sequence_length=24,
    )


def test_a_config_mixes_texts_lines_and_chats_each_with_what_it_holds_out(tmp_path: Path) -> None:
    config = _config(tmp_path)
    data = load_dataset(config)
    assert isinstance(data.train, MixedDataset)
    num = data.train.num_samples
    shares = [each / num for each in data.train.num_of_epoch]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=1 / num)
    assert [report.source for report in data.reports] == [source.source for source in config.mixture]
    # All that is held out, each sample once, whatever the weights.
    assert isinstance(data.held_out, MixedDataset)
    alone = [load_dataset(replace(config, mixture=(source,))) for source in config.mixture]
    assert alone[1].held_out is None
    held_out = [each.held_out for each in alone if each.held_out is not None]
    assert [part.fingerprint for part in data.held_out.parts] == [part.fingerprint for part in held_out]
    assert data.held_out.num_of_epoch == [part.num_samples for part in held_out]
    batches = evaluation_batches(data.held_out, micro_batch=3, dp_rank=0, dp_degree=1)
    rows = Counter(tuple(row) for batch in batches for row in batch.tokens.tolist() if set(row) != {258})
    assert rows == Counter(
        tuple(part.sample(index).tokens.tolist()) for part in held_out for index in range(part.num_samples)
    )


def test_a_mixture_of_one_source_is_that_source(tmp_path: Path) -> None:
    source = _config(tmp_path).mixture[1]
    of_mixture = load_dataset(DataConfig(mixture=(source,), sequence_length=24)).train
    alone = load_dataset(DataConfig(source=source.source, held_out_fraction=0, sequence_length=24)).train
    assert of_mixture.fingerprint == alone.fingerprint
    assert of_mixture.order(1, 2).tolist() == alone.order(1, 2).tolist()


def test_fields_of_a_single_source_beside_a_mixture_are_refused() -> None:
    with pytest.raises(ValueError, match="source, text_field and mixture are both given"):
        DataConfig(source="x", text_field="y", mixture=(WeightedSource(),))


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_weights_that_are_no_positive_numbers_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight="):
        WeightedSource(weight=weight)


def test_the_entropy_of_a_mixture_is_refused() -> None:
    with pytest.raises(ValueError, match="single source"):
        text_entropy(_mixed())
