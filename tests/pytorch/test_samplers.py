"""Samplers that repeat, share out, skip and shuffle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from det_lightning.pytorch import samplers
from det_lightning.pytorch._data import adapt_batch_sampler

sizes = st.integers(0, 40)
ranks = st.integers(1, 6)


def in_order(size: int) -> SequentialSampler:
    return SequentialSampler(range(size))


def batches_in_order(size: int, batch_size: int = 3, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(in_order(size), batch_size, drop_last)


class Tap(Sampler[int]):
    """Counts without end, and knows how many numbers were taken."""

    taken = 0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.taken += 1
            yield number


def test_repeats_have_the_length_of_a_pass() -> None:
    samples = samplers.RepeatSampler(in_order(3))
    assert list(itertools.islice(samples, 8)) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(samples) == 3
    batches = samplers.RepeatBatchSampler(batches_in_order(5))
    assert list(itertools.islice(batches, 8)) == [[0, 1, 2], [3, 4]] * 4
    assert len(batches) == 2


def test_repeats_restart_the_source() -> None:
    repeated = samplers.RepeatSampler(samplers.ReproducibleShuffleSampler(in_order(20), seed=1))
    taken = list(itertools.islice(repeated, 40))
    assert sorted(taken[:20]) == sorted(taken[20:]) == list(range(20))
    assert taken[:20] != taken[20:]


@given(sizes, ranks, st.integers(1, 7), st.booleans())
def test_shards_take_turns(size: int, num_workers: int, batch_size: int, drop: bool) -> None:
    batches = batches_in_order(size, batch_size, drop)
    for rank in range(num_workers):
        samples = samplers.DistributedSampler(in_order(size), num_workers, rank)
        assert list(samples) == list(range(rank, size, num_workers))
        assert len(samples) == len(list(samples))
        shard = samplers.DistributedBatchSampler(batches, num_workers, rank)
        assert list(shard) == list(batches)[rank::num_workers]
        assert len(shard) == len(list(shard))


@pytest.mark.parametrize(
    ("num_workers", "rank", "message"),
    [
        (0, 0, "num_workers must be at least 1; got 0"),
        (2, 2, r"rank must be in \[0, num_workers=2\); got 2"),
        (2, -1, r"rank must be in \[0, num_workers=2\); got -1"),
    ],
)
def test_impossible_shards_are_refused(num_workers: int, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samplers.DistributedBatchSampler(batches_in_order(9), num_workers, rank)


@given(sizes, st.integers(0, 50))
def test_skips_keep_the_length(size: int, skip: int) -> None:
    samples = samplers.SkipSampler(in_order(size), skip)
    assert list(samples) == list(range(size))[skip:]
    assert len(samples) == size
    batches = samplers.SkipBatchSampler(batches_in_order(size), skip)
    assert list(batches) == list(batches_in_order(size))[skip:]
    assert len(batches) == len(batches_in_order(size))


@given(sizes, st.integers(0, 2**31))
def test_shuffles_as_in_numpy(size: int, seed: int) -> None:
    samples = samplers.ReproducibleShuffleSampler(in_order(size), seed)
    batches = samplers.ReproducibleShuffleBatchSampler(batches_in_order(size), seed)
    of_samples, of_batches = np.random.RandomState(seed), np.random.RandomState(seed)
    for _ in range(3):
        expected_samples, expected_batches = list(range(size)), list(batches_in_order(size))
        of_samples.shuffle(expected_samples)
        of_batches.shuffle(expected_batches)
        assert list(samples) == expected_samples
        assert list(batches) == expected_batches
    assert len(samples) == size
    assert len(batches) == len(batches_in_order(size))


def test_shuffles_leave_global_state() -> None:
    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    list(samplers.ReproducibleShuffleSampler(in_order(10), seed=3))
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], before)


@pytest.mark.parametrize(
    ("wrap", "taken"),
    [
        (samplers.RepeatSampler, 1),
        (lambda source: samplers.SkipSampler(source, 2), 3),
        (lambda source: samplers.DistributedSampler(source, 4, 3), 4),
        (lambda source: samplers.RepeatBatchSampler(BatchSampler(source, 5, False)), 5),
        (lambda source: samplers.SkipBatchSampler(BatchSampler(source, 5, False), 2), 15),
        (lambda source: samplers.DistributedBatchSampler(BatchSampler(source, 5, False), 3, 1), 10),
    ],
)
def test_no_sample_is_taken_early(wrap: Any, taken: int) -> None:
    source = Tap()
    iterator = iter(wrap(source))
    assert source.taken == 0
    next(iterator)
    assert source.taken == taken


def test_sampler_stays_itself_if_nothing_is_asked() -> None:
    sampler = batches_in_order(4)
    assert adapt_batch_sampler(sampler) is sampler
