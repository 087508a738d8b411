"""The order of the training data, which a resumed run repeats."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

from det_lightning import errors
from det_lightning.pytorch._random_state import PassJournal, SamplerStates, isolated_rng, restore_rng

# What the workers of all ranks can be ahead of training; a sampler of the trial's own may never end.
_MOST_AHEAD = 10**6


class ResumableBatchSampler(BatchSampler):
    """Iterates over ``batch_sampler`` endlessly, from batch ``first_batch`` on, in the order recorded in ``journal``.

    Recorded passes begin in their random state, up to the batch that the interrupted run had drawn last; samplers then
    get the states that they had by then, and the global generators are as before. A new pass draws from them and is
    recorded. The length is that of one pass. The order is not repeated if a sampler changes a list of its own, or if
    workers prefetch while it draws from a generator for every sample that something else draws from too.
    """

    def __init__(self, batch_sampler: Any, journal: PassJournal, first_batch: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.journal = journal
        self.first_batch = first_batch
        journal.samplers = SamplerStates(batch_sampler)
        if journal.recorded and not journal.resumed_at:
            # The first releases noted no position. A pass is recorded once its first batch is asked for.
            drawn = max(first_batch, journal.recorded[-1].first_batch + 1)
            journal.resumed_at = {"drawn": drawn, "samplers": []}

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._passes())

    def _passes(self) -> Iterator[Iterator[Any]]:
        """Yield the batches of each pass, as an iterator that runs no Python code of its own per batch."""
        ready, batches, begun_at, index = self._repeat()
        while True:
            numbers = self.journal.count_from(index)
            numbered = zip(batches, numbers)  # noqa: B905 (the batches end, the numbers do not)
            skip = max(self.first_batch - index, 0)
            yield itertools.chain(ready, map(operator.itemgetter(0), itertools.islice(numbered, skip, None)))
            index = next(numbers)
            if index == begun_at:
                raise ValueError(
                    f"{type(self.batch_sampler).__name__} of the training data yields no batches at all: the dataset "
                    "is empty, or smaller than one batch with drop_last=True."
                )
            ready = []
            batches = self._begin(index)
            begun_at = index

    def _begin(self, index: int) -> Iterator[Any]:
        self.journal.begin_pass(index)
        return iter(self.batch_sampler)

    def _repeat(self) -> tuple[list[Any], Iterator[Any], int, int]:
        """Draw again what the interrupted run had drawn.

        Return the batches that were drawn but not trained, the rest of their pass, where that begins, and the number of
        the next batch. Batches that were trained are drawn, but neither kept nor loaded.
        """
        recorded = self.journal.recorded
        samplers = self.journal.samplers
        if not recorded:
            return [], self._begin(0), 0, 0
        until = self.journal.resumed_at["drawn"]
        if until - self.first_batch > _MOST_AHEAD:
            raise errors.InvalidCheckpointException(
                f"The checkpoint says that {until:,} batches were drawn when {self.first_batch:,} were trained, and no "
                "loader is that far ahead. Resume from another checkpoint."
            )
        trained = min(self.first_batch, until)
        ready: list[Any] = []
        index = recorded[0].first_batch
        with isolated_rng():
            for start in recorded:
                if start.first_batch != index:  # the data or the batches have another size now
                    break
                samplers.restore(start.samplers)
                restore_rng(start.rng)
                begun_at = index
                batches = iter(self.batch_sampler)
                index += sum(1 for _ in itertools.islice(batches, max(trained - index, 0)))
                drawn = list(itertools.islice(batches, max(until - index, 0)))
                ready += drawn
                index += len(drawn)
        samplers.restore(self.journal.resumed_at["samplers"])
        return ready, batches, begun_at, index
