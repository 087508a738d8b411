"""The loaders of a run: training data are endless, resumable, divided into epochs, copied ahead."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from det_lightning import errors
from det_lightning.engine.device_copies import SideStream, copy_aside
from det_lightning.engine.loader_workers import RunLoader
from det_lightning.engine.resume import continue_batches, read_journal, warn_of_own_data
from det_lightning.engine.run_options import RunOptions
from det_lightning.engine.shown_loader import ShownLoader
from det_lightning.pytorch._data import DataLoader
from det_lightning.pytorch._position import GlobalBatch
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial
from det_lightning.pytorch._random_state import PassJournal, SamplerStates


class LoaderFactory:
    """Builds the loaders of a run by the methods of the trial."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        self.trial = trial
        self.context = context

    def repeat(self, loader: Any) -> Any:
        """Return training data without end, from the position of the run on; the trial repeats its own data."""
        return loader

    def arrange(self, shown: ShownLoader, method: str) -> Any:
        """Return the data of a method of the module, such as ``train_dataloader``, as callbacks see them."""
        return shown

    def build_training(self, overfit_batches: float | None = None) -> Any:
        """Return the training loader; for ``overfit_batches`` a ``DataLoader``, or raise an UnsupportedTrainerFlags."""
        loader = self.trial.build_training_data_loader()
        if overfit_batches is not None and not isinstance(loader, DataLoader):
            raise errors.UnsupportedTrainerFlags(
                f"overfit_batches={overfit_batches} needs a det_lightning.pytorch.DataLoader; "
                f"build_training_data_loader() returned a {type(loader).__module__}.{type(loader).__name__}. Return a "
                "subset of the data instead."
            )
        return self._require_allowed("build_training_data_loader", loader)

    def build_validation(self) -> Any:
        """Return the validation loader."""
        return self._require_allowed("build_validation_data_loader", self.trial.build_validation_data_loader())

    def _require_allowed(self, method: str, loader: Any) -> Any:
        if self.context.experimental.reproducibility_checks and not isinstance(loader, DataLoader):
            raise RuntimeError(
                f"{method}() returned a {type(loader).__module__}.{type(loader).__name__}, which is not repeated, "
                "sharded and resumed for you. Return a det_lightning.pytorch.DataLoader, which takes the same "
                "arguments; or repeat, shard and resume the data yourself, and call "
                "context.experimental.disable_dataset_reproducibility_checks() in the trial's __init__."
            )
        return loader


class TrialData:
    """The loaders of a trial, for the ranks and the position of a run; sets the length of an epoch.

    With ``sharded_validation`` each rank validates on a share of the data; otherwise the chief validates on all data.
    ``has_validated`` says whether the run had validated before an interruption.

    Attributes:
        journal: how the passes over the training data began.
        global_batch: how batches are divided among ranks; None if the trial divides its data itself.
        epoch_len: number of batches in an epoch.
        training, validation: the data that the run draws from.
        shown_training, shown_validation: the same for callbacks.
        prepare_batch: moves and casts a batch.
        prepare: the same for an iterator of training batches, perhaps copied to a GPU ahead of time.
    """

    def __init__(
        self,
        loaders: LoaderFactory,
        context: PyTorchTrialContext,
        sharded_validation: bool,
        options: RunOptions,
        has_validated: bool = False,
    ) -> None:
        self._context = context
        self._replicas = context.distributed.size
        self._rank = context.distributed.rank
        self._resumed = options.resumed
        self.global_batch: GlobalBatch | None = None
        journal, self._resumed_at = read_journal(options.resumed, self._rank, self._replicas)
        self.journal = PassJournal(journal, position=self._resumed_at.get("training"))
        limit = options.epoch_limit
        loader = loaders.build_training(limit if options.overfits else None)
        # Lightning applies overfit_batches to the length of the loader, and so must see the number of all batches.
        unlimited = None
        shown = loader
        if options.overfits:
            shown = _without_shuffling(loader)
            unlimited = math.ceil(len(loader.batch_sampler) / self._replicas)
            loader = _select_first_batches(shown, limit, self._replicas)
            limit = 1.0
        is_ours = isinstance(loader, DataLoader) and loader.copies_aside(context.device)
        copies_aside = is_ours and context.experimental.auto_to_device
        training = self._resume_training(loaders, loader, copies_aside)
        length: int | None = context.distributed.broadcast(length_or_none(training))
        self.epoch_len = _limit(length or sys.maxsize, limit)
        if self.epoch_len == 0 and limit > 0:
            raise _less_than_one_batch(f"limit_train_batches={limit}", length)
        context.position.epoch_len = self.epoch_len
        self.training = RunLoader(training)
        # The loader of another rank may have one batch fewer, and then begins the next pass before the epoch ends.
        training_view = ShownLoader(shown, unlimited or length, self._replicas, self._rank)
        self.shown_training = loaders.arrange(training_view, "train_dataloader")
        validation, validation_view = self._share_validation(loaders.build_validation(), sharded_validation)
        if has_validated:
            _begin_workers_without_drawing(validation)
        self.validation = RunLoader(validation)
        self.shown_validation = loaders.arrange(validation_view, "val_dataloader")
        self._views = [(self.training, training_view), (self.validation, validation_view)]
        self.journal.validation_samplers = SamplerStates(
            # The seed of the workers is drawn from the loader's own generator.
            types.SimpleNamespace(generator=getattr(validation, "generator", None)),
            getattr(validation, "batch_sampler", None),
        )
        self.prepare_batch = self._make_preparation()
        self.prepare: Callable[[Iterator[Any]], Iterator[Any]] = functools.partial(map, self.prepare_batch)
        if copies_aside:
            self.prepare = functools.partial(copy_aside, move=self.prepare_batch, stream=SideStream(context.device))

    def restore_validation(self) -> None:
        """Give the samplers of the validation their states from the interrupted run."""
        if "validation" in self._resumed_at:
            self.journal.validation_samplers.restore(self._resumed_at["validation"])

    def close(self) -> None:
        """End the workers of both loaders; drop a loader that ends its own."""
        for source, view in self._views:
            source.close()
            if source.loader is None:
                view.drop()

    def run_out_validation(self, taken: int) -> None:
        """Exhaust the iterator once all batches are ``taken``: samplers may draw random numbers at the end."""
        if taken == length_or_none(self.validation.loader):
            next(self.validation.batches, None)

    def _make_preparation(self) -> Callable[[Any], Any]:
        moves = self._context.experimental.auto_to_device
        move: Callable[[Any], Any] = self._context.batch_mover() if moves else lambda batch: batch
        cast = self._context.precision.whole_models.batch_cast()
        return move if cast is None else lambda batch: cast(move(batch))

    def _resume_training(self, loaders: LoaderFactory, loader: Any, copies_aside: bool) -> Any:
        # Counts the batches of all ranks: a rank with an empty share of a pass gets a batch in a later pass.
        if length_or_none(loader) == 0:
            raise RuntimeError(
                "The training loader is empty: its dataset has no samples, or fewer than one batch with "
                "drop_last=True. See build_training_data_loader()."
            )
        if not isinstance(loader, DataLoader):
            if self._rank == 0:
                warn_of_own_data(self._resumed, loader, self._replicas)
            return loaders.repeat(loader)
        self.global_batch = self._choose_global_batch(loader.batch_sampler)
        self.journal.ranks = self.global_batch.ranks
        if self.global_batch.ranks != self._replicas:
            loader = copy.copy(loader)  # the trial may return the same loader for another run
            loader.batch_sampler = self.global_batch.resize(loader.batch_sampler)
        initial_batch = self._context.position.initial_batch
        shares = {"num_replicas": self._replicas, "rank": self._rank}
        return loader.get_resumable_loader(self.journal, initial_batch, **shares, pins=copies_aside)

    def _choose_global_batch(self, batch_sampler: Any) -> GlobalBatch:
        size = (self._context.settings.hparams or {}).get("global_batch_size") or None
        now = GlobalBatch.measure(batch_sampler, self._replicas, size)
        if self._resumed is None:
            return now
        chosen, follows_order = continue_batches(self._resumed, batch_sampler, now, warns=self._rank == 0)
        if not follows_order:
            self.journal.forget()
        self._context.position.initial_batch = self._resumed.trial_state.batches_trained
        return chosen

    def _share_validation(self, loader: Any, sharded: bool) -> tuple[Any, ShownLoader]:
        replicas, rank = (self._replicas, self._rank) if sharded else (1, 0)
        share = loader
        if isinstance(loader, DataLoader):
            share = loader.get_data_loader(repeat=False, skip=0, num_replicas=replicas, rank=rank)
        return share, ShownLoader(loader, length_or_none(share), replicas, rank)

    def has_even_validation(self) -> bool:
        """Return whether all ranks validate on the same number of batches; all ranks must call it."""
        lengths = self._context.distributed.allgather(length_or_none(self.validation.loader))
        return None not in lengths and len(set(lengths)) == 1


def length_or_none(loader: Any) -> int | None:
    """Return the length of a loader, or None for a loader without a length, for example over an iterable dataset."""
    try:
        return len(loader)
    except TypeError:
        return None


def _begin_workers_without_drawing(loader: Any) -> None:
    """Start persistent workers without drawing a seed again: the interrupted run has drawn the seed.

    Without a generator, the loader would draw the seed from the global random state.
    """
    if getattr(loader, "persistent_workers", False) and loader.generator is None:
        loader.generator = torch.Generator()


def _limit(length: int, limit: float) -> int:
    if isinstance(limit, int):
        return min(length, limit)
    return length if limit == 1.0 else int(length * limit)


def _less_than_one_batch(flag: str, length: int | None) -> errors.UnsupportedTrainerFlags:
    return errors.UnsupportedTrainerFlags(
        f"{flag} of the {length} training batches is less than one batch. Pass a larger share, or a number of batches."
    )


def _without_shuffling(loader: DataLoader) -> DataLoader:
    if not isinstance(loader.sampler, RandomSampler):
        return loader
    ordered = copy.copy(loader)  # the trial may return the same loader for another run
    ordered.sampler = SequentialSampler(cast("Sized", loader.dataset))
    batches = loader.batch_sampler
    ordered.batch_sampler = BatchSampler(ordered.sampler, batches.batch_size, batches.drop_last)
    return ordered


def _select_first_batches(loader: DataLoader, limit: float, replicas: int) -> DataLoader:
    """Return a loader of the first batches of ``loader`` for each of ``replicas`` ranks."""
    batches = loader.batch_sampler
    length = math.ceil(len(batches) / replicas)
    if _limit(length, limit) == 0:
        raise _less_than_one_batch(f"overfit_batches={limit}", length)
    first = copy.copy(loader)
    first.batch_sampler = FirstBatches(batches, replicas * _limit(length, limit))
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
