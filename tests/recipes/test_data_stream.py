"""Which samples each step and rank gets, and how a stream goes on after an interruption."""

import itertools
import json
from collections.abc import Sequence

import pytest
import torch

from parallel.batch import IGNORE_INDEX
from recipes.data import DataStream, PackedDataset, evaluation_batches
from tests.recipes.data_stores import byte_store

SEQUENCE_LENGTH = 8
NUM_SAMPLES = 22


def _dataset(
    num_samples: int = NUM_SAMPLES, *, fill: bytes = b"", sequence_length: int = SEQUENCE_LENGTH
) -> PackedDataset:
    text = bytes(byte % 251 for byte in range(num_samples * SEQUENCE_LENGTH - 1 - len(fill))) + fill
    return PackedDataset(byte_store(text), sequence_length=sequence_length)


def _streams(
    dp_degree: int, *, dataset: PackedDataset | None = None, global_batch: int = 8, micro_batch: int = 2, seed: int = 0
) -> list[DataStream]:
    dataset = dataset or _dataset()
    return [
        DataStream(
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            dp_rank=rank,
            dp_degree=dp_degree,
            seed=seed,
        )
        for rank in range(dp_degree)
    ]


def _step(streams: Sequence[DataStream]) -> list[int]:
    """Takes a step on all ranks; the global sample ids in their order."""
    for stream in streams:
        stream.next_step()
    columns = itertools.zip_longest(*(stream.last_sample_ids for stream in streams))
    return [sample_id for column in columns for sample_id in column if sample_id is not None]


def test_each_sample_comes_once_an_epoch_over_all_ranks() -> None:
    streams = _streams(2)
    for _ in range(3):
        ids = [sample_id for _ in range(streams[0].steps_per_epoch) for sample_id in _step(streams)]
        assert sorted(ids) == list(range(NUM_SAMPLES))
    assert streams[0].epoch == 3
    assert streams[0].position == 0


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = []
    for seed in (0, 1, 1 << 32):
        (stream,) = _streams(1, seed=seed)
        for _ in range(2):
            orders.append(tuple(i for _ in range(stream.steps_per_epoch) for i in _step([stream])))
    assert len(set(orders)) == 6


def test_the_order_of_a_seed_never_changes() -> None:
    (stream,) = _streams(1, seed=7)
    assert _step([stream]) == [12, 11, 15, 14, 17, 3, 19, 13]


@pytest.mark.parametrize(("dp_degree", "micro_batch"), [(1, 8), (1, 3), (2, 1), (2, 4), (3, 2), (4, 2), (5, 3)])
def test_the_samples_of_a_step_are_the_same_on_every_mesh(dp_degree: int, micro_batch: int) -> None:
    reference, streams = _streams(1), _streams(dp_degree, micro_batch=micro_batch)
    for _ in range(7):
        assert _step(streams) == _step(reference)


def test_ranks_that_split_a_sample_get_the_same_batches_and_others_disjoint_ones() -> None:
    one, peer = _streams(2)[0], _streams(2)[0]
    other = _streams(2)[1]
    for mine, same in zip(one.next_step(), peer.next_step(), strict=True):
        assert torch.equal(mine.tokens, same.tokens)
        assert torch.equal(mine.labels, same.labels)
    other.next_step()
    assert not set(one.last_sample_ids) & set(other.last_sample_ids)


@pytest.mark.parametrize("global_batch", [1, 5, 7, 8, 50])
@pytest.mark.parametrize("dp_degree", [1, 2, 3])
def test_every_rank_has_as_many_micro_batches_of_one_shape_and_nothing_counts_twice(
    global_batch: int, dp_degree: int
) -> None:
    streams = _streams(dp_degree, global_batch=global_batch)
    dataset = _dataset()
    num_valid = sum(int((dataset.sample(index).labels != IGNORE_INDEX).sum()) for index in range(NUM_SAMPLES))
    seen = 0
    for _ in range(streams[0].steps_per_epoch):
        for stream in streams:
            batches = stream.next_step()
            assert len(batches) == stream.num_micro_batches == -(-global_batch // (dp_degree * 2))
            assert {tuple(batch.tokens.shape) for batch in batches} == {(2, SEQUENCE_LENGTH)}
            seen += sum(int(batch.num_valid_tokens) for batch in batches)
    assert seen == num_valid


def test_the_last_accumulation_window_of_an_epoch_is_short_and_not_dropped() -> None:
    # Five micro-batches of one sample, four a step.
    dataset = _dataset(5)
    (stream,) = _streams(1, dataset=dataset, global_batch=4, micro_batch=1)
    assert stream.steps_per_epoch == 2
    first = _step([stream])
    batches = stream.next_step()
    assert sorted([*first, *stream.last_sample_ids]) == list(range(5))
    assert [int(batch.num_valid_tokens) > 0 for batch in batches] == [True, False, False, False]
    assert torch.equal(batches[0].tokens[0], torch.from_numpy(dataset.sample(stream.last_sample_ids[0]).tokens))
    assert (stream.epoch, stream.position) == (1, 0)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 9])
def test_a_resumed_stream_gives_the_samples_of_the_uninterrupted_one(num_steps: int) -> None:
    # Two ranks, two micro-batches and three steps an epoch: 3 and 9 steps end with an epoch, the others within one.
    streams = _streams(2)
    for _ in range(num_steps):
        _step(streams)
    states = [json.loads(json.dumps(stream.state_dict())) for stream in streams]
    assert states[0] == states[1]
    resumed = _streams(2)
    for stream in resumed:
        stream.load_state_dict(states[0])
    for _ in range(8):
        for stream, again in zip(streams, resumed, strict=True):
            for expected, got in zip(stream.next_step(), again.next_step(), strict=True):
                assert torch.equal(expected.tokens, got.tokens)
                assert torch.equal(expected.labels, got.labels)
            assert stream.last_sample_ids == again.last_sample_ids


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 3)])
def test_a_stream_goes_on_at_the_same_sample_with_another_data_parallel_degree(before: int, after: int) -> None:
    reference, streams = _streams(1), _streams(before)
    for _ in range(5):
        assert _step(streams) == _step(reference)
    resumed = _streams(after)
    for stream in resumed:
        stream.load_state_dict(streams[-1].state_dict())
    for _ in range(5):
        assert _step(resumed) == _step(reference)


def test_a_resume_with_another_global_batch_repeats_and_skips_nothing() -> None:
    (stream,) = _streams(1)
    ids = _step([stream])
    (resumed,) = _streams(1, global_batch=5)
    resumed.load_state_dict(stream.state_dict())
    while resumed.epoch == 0:
        ids += _step([resumed])
    assert sorted(ids) == list(range(NUM_SAMPLES))


def test_the_position_of_other_data_is_refused_with_what_differs() -> None:
    state = _streams(1)[0].state_dict()
    for stream, difference in [
        (_streams(1, seed=1)[0], "seed 0 -> 1;"),
        (_streams(1, dataset=_dataset(fill=b"other"))[0], "fingerprint "),
        (_streams(1, dataset=_dataset(sequence_length=4))[0], "sequence_length 8 -> 4; num_samples 22 -> 44;"),
    ]:
        with pytest.raises(ValueError, match=f"the data differ .*{difference}"):
            stream.load_state_dict(state)
        assert (stream.epoch, stream.position) == (0, 0)


def test_a_damaged_position_is_refused() -> None:
    (stream,) = _streams(1)
    state = stream.state_dict()
    with pytest.raises(ValueError, match="lacks fingerprint, seed"):
        stream.load_state_dict({name: value for name, value in state.items() if name not in ("seed", "fingerprint")})
    with pytest.raises(ValueError, match="position 22 is beyond the 22 samples"):
        stream.load_state_dict({**state, "position": NUM_SAMPLES})


def test_evaluation_covers_each_sample_once_with_as_many_micro_batches_on_every_rank() -> None:
    dataset = _dataset()
    for dp_degree, micro_batch in [(1, 4), (2, 4), (3, 2), (4, 8)]:
        of_ranks = [
            evaluation_batches(dataset, micro_batch=micro_batch, dp_rank=rank, dp_degree=dp_degree)
            for rank in range(dp_degree)
        ]
        assert {len(batches) for batches in of_ranks} == {-(-NUM_SAMPLES // (dp_degree * micro_batch))}
        rows = torch.cat([batch.labels for batches in of_ranks for batch in batches])
        rows = rows[(rows != IGNORE_INDEX).any(dim=1)]
        expected = torch.stack([torch.from_numpy(dataset.sample(index).labels) for index in range(NUM_SAMPLES)])
        assert sorted(rows.tolist()) == sorted(expected.tolist())


def test_batches_of_an_evaluation_are_made_when_asked_for_and_alike_each_time() -> None:
    dataset = _dataset()
    batches = evaluation_batches(dataset, micro_batch=4, dp_rank=0, dp_degree=1)
    assert len(batches) == len(list(batches)) == 6
    assert batches[1] is not batches[1]
    assert torch.equal(batches[1].tokens, batches[1].tokens)
    assert torch.equal(batches[-1].tokens, batches[5].tokens)
    assert [each.tokens.tolist() for each in batches[4:]] == [batches[4].tokens.tolist(), batches[5].tokens.tolist()]
    with pytest.raises(IndexError):
        batches[6]


def test_a_limited_evaluation_sees_the_same_spread_samples_on_every_mesh() -> None:
    dataset = _dataset()

    def rows(dp_degree: int) -> list[list[int]]:
        of_ranks = [
            evaluation_batches(dataset, micro_batch=2, dp_rank=rank, dp_degree=dp_degree, max_samples=4)
            for rank in range(dp_degree)
        ]
        tokens = torch.cat([batch.tokens[batch.labels[:, 0] != IGNORE_INDEX] for each in of_ranks for batch in each])
        return sorted(tokens.tolist())

    assert rows(1) == rows(2) == rows(3)
    assert rows(1) == sorted(dataset.sample(index).tokens.tolist() for index in (0, 5, 11, 16))


@pytest.mark.parametrize(
    ("field", "value"),
    [("global_batch", 0), ("micro_batch", 0), ("dp_rank", 2), ("dp_rank", -1), ("dp_degree", 0), ("seed", -1)],
)
def test_numbers_out_of_range_are_refused_by_name(field: str, value: int) -> None:
    arguments = {"global_batch": 8, "micro_batch": 2, "dp_rank": 0, "dp_degree": 2, "seed": 0, field: value}
    with pytest.raises(ValueError, match=f"{field}={value} must be"):
        DataStream(_dataset(), **arguments)
