"""The position of a run in its data: the current batch, a batch sampler that resumes, batches for other ranks.

Change here: ``continue_batches`` decides what a resume does with another batch size or number of ranks, and warns.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import BatchSampler

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.escaping import get_logger
from det_lightning.pytorch import samplers
from det_lightning.pytorch._random_state import PassJournal, SamplerStates, isolated_rng, restore_rng

logger = get_logger(__name__)


@dataclasses.dataclass
class TrainingPosition:
    """The current training batch; indices count from 0 over the whole run.

    ``batch_idx`` is None before the first batch, and ``epoch_len`` before the training loader is built.
    """

    initial_batch: int = 0
    batch_idx: int | None = None
    epoch_len: int | None = None

    def epoch_length(self) -> int:
        """Return the number of batches in an epoch; raise an InternalException before the loader is built."""
        if self.epoch_len is None:
            raise errors.InternalException("The length of an epoch is unknown: the training loader is not built.")
        return self.epoch_len

    def current_train_batch(self) -> int:
        if self.batch_idx is None:
            raise errors.InternalException("There is no current batch: training has not started.")
        return self.batch_idx


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
        """Yield an iterator over the batches of each pass; it runs no Python code per batch."""
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


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """The batch of all ranks together, of which each rank trains on a share.

    Attributes:
        ranks: number of ranks among which the batch was divided when the training began.
        batch_size: number of samples in a share; None if the batch sampler does not tell.
        samples_per_epoch: number of samples in a pass over the data; None if unknown.
        global_batch_size: the hyperparameter of this name, if there is one.
    """

    ranks: int
    batch_size: int | None = None
    samples_per_epoch: int | None = None
    global_batch_size: int | None = None

    @classmethod
    def measure(cls, batch_sampler: Any, ranks: int, global_batch_size: int | None) -> GlobalBatch:
        """Return the global batch of a loader with this ``batch_sampler`` on each of ``ranks`` ranks."""
        plain = _find_plain(batch_sampler)
        size = getattr(batch_sampler if plain is None else plain, "batch_size", None)
        if not isinstance(size, int) or size < 1 or not isinstance(batch_sampler, Sized):
            return cls(ranks, None, None, global_batch_size)
        samples = len(batch_sampler) * size
        if plain is not None and isinstance(plain.sampler, Sized):
            samples = min(samples, len(plain.sampler))
        return cls(ranks, size, samples, global_batch_size)

    def follows_hyperparameter(self) -> bool:
        """Return whether each rank's share follows from ``global_batch_size``."""
        return self.global_batch_size is not None and self.batch_size == self.global_batch_size // self.ranks

    def equals(self, other: GlobalBatch) -> bool:
        """Return whether the batch has the same size; a remainder that ranks drop makes no difference."""
        if self.batch_size is None or other.batch_size is None:
            return self.global_batch_size == other.global_batch_size
        if self.follows_hyperparameter() and other.follows_hyperparameter():
            return self.global_batch_size == other.global_batch_size
        return self.ranks * self.batch_size == other.ranks * other.batch_size

    def count_samples(self) -> int:
        """Return the number of samples in a whole batch."""
        return self.ranks * (self.batch_size or 0)

    def convert(self, batches: int, now: GlobalBatch) -> int:
        """Return how many batches of the size of ``now`` hold the samples of ``batches``, rounded up in each pass."""
        passes, shares = divmod(batches * self.ranks, self.count_shares())
        shares_now = min(-(-shares * (self.batch_size or 1) // (now.batch_size or 1)), now.count_shares())
        return -(-(passes * now.count_shares() + shares_now) // now.ranks)

    def count_shares(self) -> int:
        """Return the number of shares in a pass over the data, the last of which may be smaller."""
        return -(-(self.samples_per_epoch or 1) // (self.batch_size or 1))

    def find_obstacle(self, batch_sampler: Any, now: GlobalBatch) -> str | None:
        """Return why the samples of this batch cannot be dealt to the ranks of ``now``; None if they can."""
        if self.batch_size is None:
            return f"the size of the batches of {type(batch_sampler).__name__} is unknown"
        if _find_plain(batch_sampler) is None:
            return f"{type(batch_sampler).__name__} is a batch sampler of your own"
        if self.count_samples() != now.count_samples():
            whole = max(self.global_batch_size or 0, self.count_samples())
            return f"a batch of {whole} samples does not divide among {now.ranks} processes"
        return None

    def resize(self, batch_sampler: Any) -> Any:
        """Return a copy of ``batch_sampler`` with batches of :attr:`batch_size` over the same samplers of samples."""
        resized = copy.copy(batch_sampler)
        if type(batch_sampler) is BatchSampler:
            resized.batch_size = self.batch_size
        else:
            resized.batch_sampler = self.resize(batch_sampler.batch_sampler)
        return resized

    def describe_partial(self, ranks: int) -> str | None:
        """Return how ``ranks`` ranks weight the samples of a partial batch; None if all weigh the same."""
        partial = (self.samples_per_epoch or 0) % (self.batch_size or 1)
        if not partial or (self.ranks == 1 and partial % ranks == 0):
            return None
        return (
            f"the last batch of a pass over the data has {partial} samples in place of {self.batch_size}, which count "
            "for more or less in the mean over the processes than without the change"
        )


def continue_batches(
    content: CheckpointContent, batch_sampler: Any, now: GlobalBatch, *, warns: bool
) -> tuple[GlobalBatch, bool]:
    """Return the global batch to continue with, and whether the recorded order of the samples still applies.

    A position counts global batches. If their size is another one now, the position becomes the same number of samples.
    Otherwise the position stays, and the former global batches are dealt to the ranks, if possible.
    """
    before = _read_global_batch(content, now)
    kept, follows_order = now, before.batch_size == now.batch_size
    notice: str | None = None
    if not content.trial_state.batches_trained or (before.ranks == now.ranks and before.equals(now)):
        return kept, follows_order
    if not before.equals(now):
        notice = _convert_position(content, before, now)
    elif obstacle := before.find_obstacle(batch_sampler, now):
        follows_order = False
        notice = f"{obstacle}. The position stays, but samples of the current pass may be repeated or left out"
    else:
        kept, follows_order = before, True
        notice = before.describe_partial(now.ranks)
    if notice and warns:
        logger.warning(
            "The run resumes on %d process(es) after %d batches; earlier batches were divided among %d: %s.",
            *(now.ranks, content.trial_state.batches_trained, before.ranks, notice),
        )
    return kept, follows_order


def _read_global_batch(content: CheckpointContent, now: GlobalBatch) -> GlobalBatch:
    """Return the global batch of the checkpoint; for old ones from the hyperparameters, if the loader follows them."""
    resume = content.resume
    if resume is not None and resume.global_batch:
        return GlobalBatch(**resume.global_batch)
    ranks = now.ranks if resume is None else resume.world_size  # Determined does not write the number
    size = (read_settings(resume, content.load_data)["hparams"] or {}).get("global_batch_size")
    if type(size) is not int or size < ranks:
        return GlobalBatch(ranks, now.batch_size if ranks == now.ranks else None, None, now.global_batch_size)
    share = size // ranks if now.follows_hyperparameter() else now.batch_size
    return GlobalBatch(ranks, share, now.samples_per_epoch, size)


def _convert_position(content: CheckpointContent, before: GlobalBatch, now: GlobalBatch) -> str:
    """Convert the counts of batches to batches of the present size; return what was done."""
    if None in (before.batch_size, now.batch_size) or not (before.samples_per_epoch and now.samples_per_epoch):
        return "the sizes of the batches are unknown, and the position stays"
    state = content.trial_state
    for name in ("batches_trained", "last_ckpt", "last_val"):
        setattr(state, name, before.convert(getattr(state, name), now))
    content.epochs_known = False
    return (
        f"a batch of all processes had {before.count_samples()} samples and has {now.count_samples()}, and the "
        "position is the same number of samples"
    )


class DealtBatchSampler(BatchSampler):
    """Deals the batches of ``ranks`` ranks to another number of ranks, so that each global batch has the same samples.

    ``batch_sampler`` yields the shares of all ``ranks`` in turn. Rank ``rank`` of ``num_replicas`` gets its part of
    each global batch; if there are fewer samples than ranks, some ranks get the same sample.

    Example:
        >>> from det_lightning.pytorch._position import DealtBatchSampler
        >>> of_one_rank = [[0, 1, 2, 3], [4, 5, 6, 7]]
        >>> list(DealtBatchSampler(of_one_rank, ranks=1, num_replicas=2, rank=1))
        [[2, 3], [6, 7]]
    """

    def __init__(self, batch_sampler: Any, ranks: int, num_replicas: int, rank: int) -> None:
        self.batch_sampler = batch_sampler
        self.ranks = ranks
        self.num_replicas = num_replicas
        self.rank = rank

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self.ranks)

    def __iter__(self) -> Iterator[list[Any]]:
        shares = iter(self.batch_sampler)
        while samples := [*itertools.chain.from_iterable(itertools.islice(shares, self.ranks))]:
            begin, end = (len(samples) * rank // self.num_replicas for rank in (self.rank, self.rank + 1))
            yield samples[begin : max(begin + 1, end)]


def _find_plain(batch_sampler: Any) -> BatchSampler | None:
    """Return torch's BatchSampler inside Determined's samplers, which only reorder or repeat batches; else None."""
    while type(batch_sampler) in (samplers.RepeatBatchSampler, samplers.ReproducibleShuffleBatchSampler):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler if type(batch_sampler) is BatchSampler else None
