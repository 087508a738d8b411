"""A trial's loaders as Lightning sees them: training data is endless, resumable, divided into epochs, copied ahead."""

from __future__ import annotations

import copy
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, cast

import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from det_lightning import errors
from det_lightning.checkpoint.storage.snapshots import iterate_tensors
from det_lightning.engine.loader_workers import RunLoader
from det_lightning.pytorch._data import DataLoader
from det_lightning.pytorch._position import TrainingPosition
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial
from det_lightning.pytorch._random_state import PassJournal, SamplerStates


class TrialData:
    """The loaders of a trial, for the ranks and the position of a run; sets the length of an epoch.

    With ``sharded_validation`` each rank validates on its share; otherwise the chief validates on all of the data.
    A resumed run has the ``journal`` of its checkpoint, which says how the passes over the training data began, and is
    ``resumed_at`` the positions of its checkpoint. ``limit`` is the maximum number of batches in an epoch (an int), or
    a share of the loader's batches (a float). With ``overfits`` every epoch has the same ones, the first in dataset
    order. ``has_validated`` says whether the run had validated before it was interrupted. ``given`` has functions that
    build loaders in place of the trial, by the name of its method.
    """

    def __init__(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        sharded_validation: bool,
        journal: list[dict[str, Any]] | None = None,
        resumed_at: dict[str, Any] | None = None,
        limit: float = 1.0,
        overfits: bool = False,
        has_validated: bool = False,
        given: Mapping[str, Callable[[], Any]] = types.MappingProxyType({}),
    ) -> None:
        self._context = context
        self._given = given
        self._replicas = context.distributed.size
        self._rank = context.distributed.rank
        self._resumed_at = resumed_at or {}
        self.journal = PassJournal(journal, position=self._resumed_at.get("training"))
        #: Training batches are copied to the device on a side stream.
        self.copies_aside = False
        loader = self._build("build_training_data_loader", trial)
        # Lightning applies overfit_batches to the length that it sees, so it must see that of all batches.
        unlimited = _length_of_share(loader, self._replicas) if overfits else None
        if overfits:
            loader = _with_first_batches(loader, limit, self._replicas)
            limit = 1.0
        training = self._build_training(loader)
        length: int | None = context.distributed.broadcast(_length(training))
        self.epoch_len = _limited(length or sys.maxsize, limit)
        if self.epoch_len == 0 and limit > 0:
            raise _less_than_one_batch(f"limit_train_batches={limit}", length)
        context.position.epoch_len = self.epoch_len
        self.training = TrainStream(training, context.position, unlimited or length)
        validation = self._build("build_validation_data_loader", trial)
        validation = self._build_validation(validation, sharded_validation)
        if has_validated:
            _begin_workers_without_drawing(validation)
        self.validation = ValidationStream(validation)
        self.journal.validation_samplers = SamplerStates(
            # The seed of the workers is drawn from the loader's own generator.
            types.SimpleNamespace(generator=getattr(validation, "generator", None)),
            getattr(validation, "batch_sampler", None),
        )

    def _build(self, method: str, trial: PyTorchTrial) -> Any:
        return self._given[method]() if method in self._given else getattr(trial, method)()

    def restore_validation(self) -> None:
        """Give the samplers of the validation the states that they had in the interrupted run."""
        if "validation" in self._resumed_at:
            self.journal.validation_samplers.restore(self._resumed_at["validation"])

    def close(self) -> None:
        """End the workers of both loaders."""
        self.training.close()
        self.validation.source.close()

    def _build_training(self, loader: Any) -> Any:
        if not isinstance(loader, DataLoader):
            self._require_allowed("build_training_data_loader", loader)
        # Counts the batches of all ranks: a rank whose share of one pass is empty gets a batch in a later pass.
        if _length(loader) == 0:
            raise RuntimeError(
                "The training loader is empty: its dataset has no samples, or fewer than one batch with "
                "drop_last=True. See build_training_data_loader()."
            )
        if not isinstance(loader, DataLoader):
            return loader
        initial_batch = self._context.position.initial_batch
        shares = {"num_replicas": self._replicas, "rank": self._rank}
        self.copies_aside = loader.copies_aside(self._context.device) and self._context.experimental.auto_to_device
        return loader.get_resumable_loader(self.journal, initial_batch, **shares, pins=self.copies_aside)

    def _build_validation(self, loader: Any, sharded: bool) -> Any:
        if not isinstance(loader, DataLoader):
            self._require_allowed("build_validation_data_loader", loader)
            return loader
        replicas, rank = (self._replicas, self._rank) if sharded else (1, 0)
        return loader.get_data_loader(repeat=False, skip=0, num_replicas=replicas, rank=rank)

    def _require_allowed(self, method: str, loader: Any) -> None:
        if self._context.experimental.reproducibility_checks and method not in self._given:
            raise RuntimeError(
                f"{method}() returned a {type(loader).__module__}.{type(loader).__name__}, which is not repeated, "
                "sharded and resumed for you. Return a det_lightning.pytorch.DataLoader, which takes the same "
                "arguments; or, to do all of that yourself, you can disable this check by calling "
                "context.experimental.disable_dataset_reproducibility_checks() in the trial's __init__."
            )

    def has_even_validation(self) -> bool:
        """Return whether all ranks validate on the same number of batches; all ranks must call it."""
        lengths = self._context.distributed.allgather(_length(self.validation.source.loader))
        return None not in lengths and len(set(lengths)) == 1


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _begin_workers_without_drawing(loader: Any) -> None:
    """Start persistent workers without drawing their seed again, which the interrupted run has already done.

    Without a generator of its own, the loader would draw the seed from the global random state.
    """
    if getattr(loader, "persistent_workers", False) and loader.generator is None:
        loader.generator = torch.Generator()


def _limited(length: int, limit: float) -> int:
    if isinstance(limit, int):
        return min(length, limit)
    return length if limit == 1.0 else int(length * limit)


def _length_of_share(loader: Any, replicas: int) -> int | None:
    return math.ceil(len(loader.batch_sampler) / replicas) if isinstance(loader, DataLoader) else None


def _less_than_one_batch(flag: str, length: int | None) -> errors.UnsupportedTrainerFlags:
    return errors.UnsupportedTrainerFlags(
        f"{flag} of the {length} training batches is less than one batch. Give a larger share, or a number of batches."
    )


def _with_first_batches(loader: Any, limit: float, replicas: int) -> DataLoader:
    """Return a loader that gives each of ``replicas`` ranks the first batches of ``loader``, without shuffling."""
    if not isinstance(loader, DataLoader):
        raise errors.UnsupportedTrainerFlags(
            f"overfit_batches={limit} needs a det_lightning.pytorch.DataLoader; build_training_data_loader() returned "
            f"a {type(loader).__module__}.{type(loader).__name__}. Return a subset of the data instead."
        )
    batches = loader.batch_sampler
    if isinstance(loader.sampler, RandomSampler):
        batches = BatchSampler(SequentialSampler(cast("Sized", loader.dataset)), batches.batch_size, batches.drop_last)
    length = math.ceil(len(batches) / replicas)
    if _limited(length, limit) == 0:
        raise _less_than_one_batch(f"overfit_batches={limit}", length)
    first = copy.copy(loader)  # the trial may return the same loader for another run
    first.batch_sampler = FirstBatches(batches, replicas * _limited(length, limit))
    return first


class FirstBatches(BatchSampler):
    """Yields the first ``count`` batches of ``batch_sampler``."""

    def __init__(self, batch_sampler: Any, count: int) -> None:
        self.batch_sampler = batch_sampler
        self.count = count

    def __len__(self) -> int:
        return min(self.count, len(self.batch_sampler))

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.batch_sampler, self.count)


class TrainStream:
    """One endless iterator over the training data, which Lightning gets one epoch at a time.

    Workers and shuffling persist between epochs. Once an epoch has begun, ``batches`` yields from the next batch on.
    ``length`` is the length of the chief's loader, or None if it has none. The loader of another rank may have one
    batch fewer; it then begins its next pass before the epoch ends.
    """

    def __init__(self, loader: Any, position: TrainingPosition, length: int | None) -> None:
        self._source = RunLoader(loader)
        self._position = position
        self._length = length
        self._is_open = False

    @property
    def batches(self) -> Iterator[Any]:
        """The batches from the next one on, without end; none before the first epoch."""
        return self._source.batches

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The training loader of the chief has no length.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # Created now and not with the first batch, because creating it draws from the global random state.
        if not self._is_open:
            self._source.begin()
            self._is_open = True
        epoch_len = self._position.epoch_length()
        return itertools.islice(self.batches, epoch_len - self._position.batches_trained() % epoch_len)

    def close(self) -> None:
        """Drop the iterator, and end its workers."""
        self._source.close()
        self._is_open = False


class ValidationStream:
    """The validation data, from the start for each validation; reading begins when the first batch is needed."""

    def __init__(self, loader: Any) -> None:
        self.source = RunLoader(loader)

    def __len__(self) -> int:
        # Lightning would skip the validation on a rank that gets no batches.
        return max(1, len(self.source.loader))

    def __iter__(self) -> Iterator[Any]:
        # A generator, because Lightning asks for the iterator before on_validation_start.
        yield from self.source.begin()

    def run_out(self, taken: int) -> None:
        """Exhaust the iterator if all batches are ``taken``: samplers may draw random numbers after the last one."""
        if taken == _length(self.source.loader):
            next(self.source.batches, None)


class SideStream:
    """A CUDA stream for the copies of one device, in parallel with its work. The host waits for none of them.

    A *mark* is a point in the order of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Return a mark at the end of the work submitted so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, move: Callable[[Any], Any], batch: Any, after: Any) -> tuple[Any, Any]:
        """Begin ``move(batch)`` when the work reaches the mark ``after``; return its result, and a mark at its end."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            moved = move(batch)
        return moved, self._stream.record_event()

    def hand_over(self, moved: Any, end: Any) -> None:
        """Make the work submitted from now on wait for the mark ``end``, so that it can use ``moved``."""
        working = torch.cuda.current_stream(self._device)
        working.wait_event(end)
        for tensor in iterate_tensors(moved):
            if tensor.is_cuda:
                tensor.record_stream(working)  # its memory is not reused before the work on it is done


def copy_aside(batches: Iterator[Any], move: Callable[[Any], Any], stream: SideStream) -> Iterator[Any]:
    """Yield each batch as ``move`` returns it, copied while the device still works on the previous one.

    No batch is taken from ``batches`` before it is asked for, so random numbers are drawn in the usual order and a
    checkpoint counts what was trained. The host is ahead of the device by then.
    """
    before = stream.mark()
    for batch in batches:
        # At that mark the memory of the batch before the last is free, and this batch may reuse it.
        moved, end = stream.copy(move, batch, before)
        before = stream.mark()
        stream.hand_over(moved, end)
        yield moved
