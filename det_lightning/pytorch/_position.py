"""The position of a run in the training data, and a batch sampler that repeats the order of an interrupted run."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

from det_lightning import errors
from det_lightning.pytorch._random_state import PassJournal, SamplerStates, isolated_rng, restore_rng


@dataclasses.dataclass
class TrainingPosition:
    """The current training batch; indices count from 0 over the whole run.

    ``batch_idx`` is None before the first batch, and ``epoch_len`` before the training loader is built.
    """

    initial_batch: int = 0
    batch_idx: int | None = None
    epoch_len: int | None = None

    def batches_trained(self) -> int:
        """Return the number of batches before the next one, over the whole run."""
        return self.initial_batch if self.batch_idx is None else self.batch_idx + 1

    def epoch_length(self) -> int:
        """Return the number of batches in an epoch; raise an InternalException before the loader is built."""
        if self.epoch_len is None:
            raise errors.InternalException("The length of an epoch is unknown: the training loader is not built.")
        return self.epoch_len

    def current_train_batch(self) -> int:
        """Return the index of the current batch; raise an InternalException before training has started."""
        if self.batch_idx is None:
            raise errors.InternalException("There is no current batch: training has not started.")
        return self.batch_idx

    def current_train_epoch(self) -> int:
        """Return the index of the current epoch, from 0."""
        return self.current_train_batch() // self.epoch_length()

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first of an epoch."""
        return self.current_train_batch() % self.epoch_length() == 0

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last of an epoch."""
        return (self.current_train_batch() + 1) % self.epoch_length() == 0

    def get_initial_batch(self) -> int:
        """Return the index of the first batch of this run: 0, or the position of the checkpoint resumed from."""
        return self.initial_batch


class ResumableBatchSampler(BatchSampler):
    """Iterates over ``batch_sampler`` endlessly, from batch ``first_batch`` on, in the order recorded in ``journal``.

    Recorded passes begin in the recorded random states, and end with the batch last drawn by the interrupted run.
    Samplers then get the states at that batch, and the global generators are restored. New passes draw from the
    generators and are recorded. The length is the length of one pass. The order is not repeated if a sampler changes
    a list, or if workers prefetch while a sampler shares a generator with other code and draws for every sample.
    """

    def __init__(self, batch_sampler: Any, journal: PassJournal, first_batch: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.journal = journal
        self.first_batch = first_batch
        journal.samplers = SamplerStates(batch_sampler)
        if journal.recorded and not journal.resumed_at:
            # The first releases noted no position, and recorded a pass when the first batch was requested.
            drawn = max(first_batch, journal.recorded[-1]["first_batch"] + 1)
            journal.resumed_at = {"drawn": drawn, "samplers": []}

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._passes())

    def _passes(self) -> Iterator[Iterator[Any]]:
        """Yield the batches of each pass, as an iterator that runs no Python code per batch."""
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
            self.journal.begin_pass(index)
            ready = []
            batches = iter(self.batch_sampler)
            begun_at = index

    def _repeat(self) -> tuple[list[Any], Iterator[Any], int, int]:
        """Draw the batches of the interrupted run again; trained batches are neither kept nor loaded.

        Return the batches drawn but not trained, the rest of the current pass, the first batch of the pass, and the
        number of the next batch.
        """
        recorded = self.journal.recorded
        samplers = self.journal.samplers
        if not recorded:
            self.journal.begin_pass(0)
            return [], iter(self.batch_sampler), 0, 0
        until = self.journal.resumed_at["drawn"]
        trained = min(self.first_batch, until)
        ready: list[Any] = []
        index = recorded[0]["first_batch"]
        with isolated_rng():
            for start in recorded:
                if start["first_batch"] != index:  # the data or the batches have another size now
                    break
                samplers.restore(start["samplers"])
                restore_rng(start["rng"])
                begun_at = index
                batches = iter(self.batch_sampler)
                index += sum(1 for _ in itertools.islice(batches, max(trained - index, 0)))
                drawn = list(itertools.islice(batches, max(until - index, 0)))
                ready += drawn
                index += len(drawn)
        samplers.restore(self.journal.resumed_at["samplers"])
        return ready, batches, begun_at, index
