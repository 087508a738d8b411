"""The data of a call of ``pl.Trainer``, in place of the loaders from a trial."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.utils.data

from det_lightning import errors
from det_lightning.adapters.lightning_package import pl
from det_lightning.engine.data_stream import (
    LoaderFactory,
    RepeatingLoader,
    find_stateful,
    length_or_none,
    list_samplers,
    list_told,
)
from det_lightning.engine.loaders import ShownLoader
from det_lightning.engine.train_and_evaluate import overrides
from det_lightning.escaping import get_logger
from det_lightning.pytorch._data import DataLoader
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import ExternalStateTrial, PyTorchTrial, original_trial

logger = get_logger(__name__)

_MOVING_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_ARGUMENTS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


def refuse_moving_hooks(datamodule: pl.LightningDataModule | None) -> None:
    """Raise an UnsupportedTrainerFlags if a data module overrides hooks that move batches: a trial does that itself."""
    names = [
        name for name in _MOVING_HOOKS if datamodule is not None and overrides(datamodule, pl.LightningDataModule, name)
    ]
    if names:
        raise errors.UnsupportedTrainerFlags(
            f"{type(datamodule).__name__} has {' and '.join(names)}, and a trial moves its batches itself: change the "
            "batch in the dataset, in the collate_fn, or in the trial's train_batch() and evaluate_batch()."
        )


def warn_of_lost_state(datamodule: pl.LightningDataModule | None) -> None:
    """Warn if a data module has a state, which ``DeterminedCheckpoint`` does not write."""
    if datamodule is not None and overrides(datamodule, pl.LightningDataModule, "state_dict"):
        logger.warning(
            "DeterminedCheckpoint writes the trial, without the state_dict() of %s. A ModelCheckpoint writes both.",
            type(datamodule).__name__,
        )


class CallDataloaders(LoaderFactory):
    """Builds the loaders of a run from the data of a call; the trial builds the loaders of missing data.

    A loader of torch over a map-style dataset becomes a ``det_lightning.pytorch.DataLoader``, sharded and resumed like
    a loader of the trial. ``sources`` come from ``take_call_dataloaders``.
    """

    def __init__(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        sources: Mapping[str, Callable[[], Any]],
        trainer: pl.Trainer,
    ) -> None:
        super().__init__(trial, context)
        self._sources = sources
        self._trainer = trainer
        self._given: dict[str, Any] = {}
        if sources and isinstance(trial, ExternalStateTrial):
            raise errors.UnsupportedTrainerFlags(
                f"{type(original_trial(trial)).__name__} reads its own data; pass no data to the trainer."
            )

    def _take(self, method: str) -> Any:
        self._given[method] = given = self._sources[method]()
        return _adapt(given, method, self.context)

    def take_training(self) -> Any:
        """Return the training loader: a ``DataLoader``, or the data of the call."""
        if "train_dataloader" in self._sources:
            return self._take("train_dataloader")
        if "val_dataloader" in self._sources and not self._trainer.training:
            return itertools.repeat(None)  # the trial's own training data may not be there
        return super().take_training()

    def repeat(self, loader: Any) -> Any:
        """Return endless passes over training data of the call, from the position of the run on."""
        if "train_dataloader" not in self._sources:
            return super().repeat(loader)
        return RepeatingLoader(loader, self.context.position, find_stateful(loader), skips=True)

    def arrange(self, shown: ShownLoader, method: str) -> Any:
        """Return data as callbacks see them: in a list or dict if the call was given one."""
        given = self._given.get(method)
        if isinstance(given, dict):
            return dict.fromkeys(given, shown)
        return [shown] if isinstance(given, list | tuple) else shown

    def build_validation(self) -> Any:
        """Return the validation loader; an empty tuple if the data have no batch."""
        if "val_dataloader" not in self._sources:
            return super().build_validation()
        loader = self._take("val_dataloader")
        return () if length_or_none(loader) == 0 else loader

    def require_epochs(self, epoch_len: int) -> None:
        """Raise an UnsupportedTrainerFlags if data without a length are to be trained for a number of epochs."""
        epochs = self._trainer.max_epochs
        if "train_dataloader" in self._sources and epoch_len == sys.maxsize and epochs not in (-1, None):
            raise errors.UnsupportedTrainerFlags(
                f"max_epochs={epochs} with training data that have no length: give the data a __len__; or pass "
                "limit_train_batches=n, which is then the length of an epoch, or max_steps= in place of max_epochs=."
            )


def holds_nothing(loader: Any) -> bool:
    """Return whether the validation data of a call are empty, so that there is no validation."""
    return isinstance(loader, tuple) and not loader


def _adapt(given: Any, name: str, context: PyTorchTrialContext) -> Any:
    loader: Any = take_only_loader(given, name)
    is_sharded = _is_map_style(loader) and loader.batch_sampler is not None
    if not isinstance(loader, Iterable):
        raise errors.UnsupportedTrainerFlags(f"{name}: a trial takes a loader or any iterable; got {loader!r}.")
    if context.distributed.size > 1:
        _refuse_shares(loader, name, is_sharded, context.distributed.size)
    return _make_determined_loader(loader) if is_sharded else loader


def _refuse_shares(loader: Any, name: str, is_sharded: bool, ranks: int) -> None:
    """Raise an UnsupportedTrainerFlags if each of several ranks would get all data, or a share of its share."""
    has_sampler = is_sharded and any(
        isinstance(one, torch.utils.data.DistributedSampler) for one in list_samplers(loader)
    )
    if has_sampler:
        problem = "the loader has a DistributedSampler, and a trial's data are sharded anyway: leave the sampler out"
    elif not is_sharded and (_is_map_style(loader) or (name == "train_dataloader" and _reads_all(loader))):
        problem = (
            f"each of {ranks} ranks would get all data of the {type(loader).__name__}: pass a torch DataLoader "
            "with a batch_size, which is sharded, or a sampler that divides the data"
        )
    else:
        return
    raise errors.UnsupportedTrainerFlags(f"{name}: {problem}.")


class TellsEpochs(torch.utils.data.BatchSampler):
    """Calls the ``set_epoch`` of samplers at the start of each pass, as Lightning does."""

    def __init__(self, batch_sampler: Any, samplers: list[Any]) -> None:
        self.batch_sampler = batch_sampler
        self._told = samplers
        self.passes = 0  # checkpoints hold the number, like any number of a sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        for sampler in self._told:
            sampler.set_epoch(self.passes)
        self.passes += 1
        return iter(self.batch_sampler)


def take_only_loader(given: Any, name: str) -> Any:
    """Return the only loader in data given under a name, or refuse several."""
    if isinstance(given, pl.utilities.combined_loader.CombinedLoader):
        given = given.iterables
    if not isinstance(given, list | tuple | dict):
        return given
    # With a dict of loaders, a plain module trains on dicts of batches.
    is_mixed = isinstance(given, dict) and name == "train_dataloader"
    loaders = list(given.values() if isinstance(given, dict) else given)
    if len(loaders) < 2 and not is_mixed:
        return next(iter(loaders), ())
    raise errors.UnsupportedTrainerFlags(
        f"{name}: a trial takes one loader; got a {type(given).__name__} of loaders. Combine their datasets, or call "
        "validate() or test() once for each; for a list of batches pass torch.utils.data.DataLoader(batches, "
        "batch_size=None)."
    )


def _is_map_style(loader: Any) -> bool:
    """Return whether a loader is nothing but torch's, over a map-style dataset."""
    return (
        isinstance(loader, torch.utils.data.DataLoader)
        and type(loader).__iter__ is torch.utils.data.DataLoader.__iter__
        and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
    )


def _reads_all(loader: Any) -> bool:
    """Return whether a loader covers a whole map-style dataset, in an order that the caller did not choose."""
    return (
        isinstance(loader, torch.utils.data.DataLoader)
        and not isinstance(loader.dataset, torch.utils.data.IterableDataset)
        # Of torch, or those of torchdata with the same names.
        and type(loader.sampler).__name__ in ("SequentialSampler", "RandomSampler")
        and type(loader.batch_sampler).__name__ == "BatchSampler"
    )


def _make_determined_loader(loader: Any) -> DataLoader:
    arguments = {name: value for name in _ARGUMENTS if (value := getattr(loader, name, None)) is not None}
    told = list_told(loader)
    batches = TellsEpochs(loader.batch_sampler, told) if told else loader.batch_sampler
    made = DataLoader(loader.dataset, batch_sampler=batches, **arguments)
    # As callbacks see them.
    made.batch_size, made.sampler, made.drop_last = loader.batch_size, loader.sampler, loader.drop_last
    return made
