"""Samplers that repeat, distribute over ranks, skip, and shuffle reproducibly.

To compose samplers, shuffle first, then repeat, then distribute, and skip last. A skip after the repeat happens only
once, not in every epoch; a skip after the shuffle keeps the shuffle reproducible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, Sampler

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "SkipBatchSampler",
    "SkipSampler",
]


def _repeat(source: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from source


def _shard_len(total: int, num_workers: int, rank: int) -> int:
    return total // num_workers + int(total % num_workers > rank)


class RepeatSampler(Sampler[Any]):
    """Repeat ``sampler`` endlessly. The length remains the length of one pass.

    Example:
        >>> import itertools
        >>> from det_lightning.pytorch import RepeatSampler
        >>> sampler = RepeatSampler([0, 1, 2])
        >>> list(itertools.islice(sampler, 5)), len(sampler)
        ([0, 1, 2, 0, 1], 3)
    """

    def __init__(self, sampler: Sampler[Any]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return _repeat(self.sampler)


class RepeatBatchSampler(BatchSampler):
    """Repeat ``batch_sampler`` endlessly. The length remains the length of one pass.

    Example:
        >>> import itertools
        >>> from torch.utils.data import BatchSampler
        >>> from det_lightning.pytorch import RepeatBatchSampler
        >>> sampler = RepeatBatchSampler(BatchSampler([0, 1, 2, 3], batch_size=2, drop_last=False))
        >>> list(itertools.islice(sampler, 3)), len(sampler)
        ([[0, 1], [2, 3], [0, 1]], 2)
    """

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        return _repeat(self.batch_sampler)


class DistributedSampler(Sampler[Any]):
    """Give rank ``rank`` every ``num_workers``-th sample, beginning with sample ``rank``.

    Nothing is padded or dropped, so the lengths of two ranks may differ by one.

    Example:
        >>> from det_lightning.pytorch import DistributedSampler
        >>> list(DistributedSampler([0, 1, 2, 3, 4], num_workers=2, rank=1))
        [1, 3]
    """

    def __init__(self, sampler: Sampler[Any], num_workers: int, rank: int) -> None:
        self.sampler = sampler
        self.num_workers = num_workers
        self.rank = rank

    def __len__(self) -> int:
        return _shard_len(len(self.sampler), self.num_workers, self.rank)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.sampler, self.rank, None, self.num_workers)


class DistributedBatchSampler(BatchSampler):
    """Give rank ``rank`` every ``num_workers``-th batch, beginning with batch ``rank``.

    Raises:
        ValueError: ``rank`` is not in ``[0, num_workers)`` or ``num_workers`` is below 1.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> from det_lightning.pytorch import DistributedBatchSampler
        >>> batches = BatchSampler(range(6), batch_size=2, drop_last=False)
        >>> list(DistributedBatchSampler(batches, num_workers=2, rank=0))
        [[0, 1], [4, 5]]
    """

    def __init__(self, batch_sampler: BatchSampler, num_workers: int, rank: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1; got {num_workers}.")
        if not 0 <= rank < num_workers:
            raise ValueError(f"rank must be in [0, num_workers={num_workers}); got {rank}.")
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self.rank = rank

    def __len__(self) -> int:
        return _shard_len(len(self.batch_sampler), self.num_workers, self.rank)

    def __iter__(self) -> Iterator[list[Any]]:
        yield from itertools.islice(self.batch_sampler, self.rank, None, self.num_workers)


class SkipSampler(Sampler[Any]):
    """Skip the first ``skip`` samples. The length remains the length of ``sampler``.

    Example:
        >>> from det_lightning.pytorch import SkipSampler
        >>> sampler = SkipSampler([0, 1, 2, 3], skip=1)
        >>> list(sampler), len(sampler)
        ([1, 2, 3], 4)
    """

    def __init__(self, sampler: Sampler[Any], skip: int) -> None:
        self.sampler = sampler
        self.skip = skip

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.sampler, self.skip, None)


class SkipBatchSampler(BatchSampler):
    """Skip the first ``skip`` batches. The length remains the length of ``batch_sampler``.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> from det_lightning.pytorch import SkipBatchSampler
        >>> list(SkipBatchSampler(BatchSampler(range(6), batch_size=2, drop_last=False), skip=2))
        [[4, 5]]
    """

    def __init__(self, batch_sampler: BatchSampler, skip: int) -> None:
        self.batch_sampler = batch_sampler
        self.skip = skip

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        yield from itertools.islice(self.batch_sampler, self.skip, None)


class ReproducibleShuffleSampler(Sampler[Any]):
    """Shuffle the samples of each pass with one ``numpy.random.RandomState(seed)``, so that passes differ.

    Example:
        >>> from det_lightning.pytorch import ReproducibleShuffleSampler
        >>> sampler = ReproducibleShuffleSampler([0, 1, 2, 3, 4], seed=0)
        >>> list(sampler), list(sampler)
        ([2, 0, 1, 3, 4], [0, 2, 1, 4, 3])
    """

    def __init__(self, sampler: Sampler[Any], seed: int) -> None:
        self.sampler = sampler
        self.random_state = np.random.RandomState(seed)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        samples = list(self.sampler)
        self.random_state.shuffle(samples)
        return iter(samples)


class ReproducibleShuffleBatchSampler(BatchSampler):
    """Shuffle the batches of each pass with one ``numpy.random.RandomState(seed)``, so that passes differ.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> from det_lightning.pytorch import ReproducibleShuffleBatchSampler
        >>> batches = BatchSampler(range(6), batch_size=2, drop_last=False)
        >>> sorted(ReproducibleShuffleBatchSampler(batches, seed=0))
        [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(self, batch_sampler: BatchSampler, seed: int) -> None:
        self.batch_sampler = batch_sampler
        self.random_state = np.random.RandomState(seed)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = list(self.batch_sampler)
        self.random_state.shuffle(batches)
        return iter(batches)
