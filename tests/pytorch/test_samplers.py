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


def test_repeats_restart_the_source() -> None:
    repeated = samplers.RepeatSampler(samplers.ReproducibleShuffleSampler(in_order(20), seed=1))
    taken = list(itertools.islice(repeated, 40))
    assert sorted(taken[:20]) == sorted(taken[20:]) == list(range(20))
    assert taken[:20] != taken[20:]


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


@given(sizes, st.integers(0, 2**31))
def test_shuffles_are_those_of_numpy(size: int, seed: int) -> None:
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
