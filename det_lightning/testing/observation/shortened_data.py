"""Shortens the user's data to epochs and validations of a few batches; reads the sizes of loaders."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, Subset

from det_lightning.engine.data_stream import FirstBatches
from det_lightning.pytorch import DataLoader


@dataclasses.dataclass(frozen=True)
class ShortenedData:
    """How to shorten the data of a run; by default not at all. Only loaders of det_lightning are shortened."""

    epoch_batches: int | None = None  # number of batches in an epoch; all epochs have the same samples
    validation_samples: int | None = None  # number of first samples of the dataset to validate on
    halves_validation_batch: bool = False  # give a validation batch half as many samples
    loads_here: bool = False  # load in the training process, so that random draws for samples can be seen

    def shorten_training(self, loader: Any) -> Any:
        """Return a loader of the first samples; the loader shuffles if the user's loader does."""
        if self.loads_here and isinstance(loader, DataLoader):
            loader = _without_workers(loader)
        if self.epoch_batches is None or not isinstance(loader, DataLoader) or len(loader) <= self.epoch_batches:
            return loader
        short = copy.copy(loader)  # the trial may return the same loader for another run
        short.batch_sampler = _first_samples(loader, self.epoch_batches)
        return short

    def shorten_validation(self, loader: Any) -> Any:
        if not isinstance(loader, DataLoader) or not (batch_size := loader.batch_size):
            return loader
        dataset = loader.dataset
        if self.validation_samples is not None and makes_batches(loader):
            with contextlib.suppress(TypeError):  # a dataset without a length
                count = min(self.validation_samples, len(dataset))  # type: ignore[arg-type]
                dataset = Subset(dataset, range(count))
        if self.halves_validation_batch:
            batch_size //= 2
        if dataset is loader.dataset and batch_size == loader.batch_size:
            return loader
        return _change_batch_size(loader, dataset, max(1, batch_size))


def _without_workers(loader: DataLoader) -> DataLoader:
    alone = copy.copy(loader)
    alone.num_workers = alone.timeout = 0
    alone.prefetch_factor = alone.multiprocessing_context = None
    alone.persistent_workers = False
    return alone


ALL_DATA = ShortenedData()


def _first_samples(loader: DataLoader, batches: int) -> BatchSampler:
    """Return a sampler of the first batches of each pass, which shuffles the same samples if the loader shuffles."""
    sampler = loader.sampler
    if not makes_batches(loader) or not isinstance(sampler, RandomSampler):
        return FirstBatches(loader.batch_sampler, batches)
    size = int(loader.batch_sampler.batch_size)
    some = RandomSampler(range(batches * size), sampler.replacement, generator=sampler.generator)
    return BatchSampler(some, size, loader.batch_sampler.drop_last)


def makes_batches(loader: DataLoader) -> bool:
    """Return whether ``batch_size`` and ``sampler`` make the batches, rather than the user's ``batch_sampler``."""
    return type(loader.batch_sampler) is BatchSampler


def _change_batch_size(loader: DataLoader, dataset: Any, batch_size: int) -> DataLoader:
    short = copy.copy(loader)
    short.dataset = dataset
    short.batch_size = batch_size
    short.sampler = range(len(dataset))
    short.batch_sampler = BatchSampler(short.sampler, batch_size, loader.drop_last)
    return short


@dataclasses.dataclass(frozen=True)
class LoaderFacts:
    """Sizes of a loader, each None if unknown."""

    batches: int | None = None  # in a pass
    full_batches: int | None = None  # batches of a pass with all of their samples
    samples: int | None = None  # of the dataset
    batch_size: int | None = None
    is_sharded: bool = True  # whether det_lightning divides the data of the loader
    has_own_batches: bool = False  # whether a batch_sampler of the user makes the batches

    @classmethod
    def read(cls, loader: Any) -> LoaderFacts:
        """Return the facts of a loader of any class."""
        batches = full = samples = None
        with contextlib.suppress(TypeError):
            batches = len(loader)
        with contextlib.suppress(AttributeError, TypeError):
            samples = len(loader.dataset)
        with contextlib.suppress(AttributeError, TypeError):
            full = len(loader.batch_sampler.sampler) // loader.batch_sampler.batch_size
        ours = isinstance(loader, DataLoader)
        own_batches = ours and not makes_batches(loader)
        return cls(batches, full, samples, getattr(loader, "batch_size", None), ours, own_batches)
