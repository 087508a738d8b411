"""Lightning's loops and connectors, adapted to trials by undocumented names."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from det_lightning.adapters.lightning_package import (
    CheckpointConnector,
    DataLoaderSource,
    LoggerConnector,
    RunningStage,
    TrainerFn,
    pl,
)
from det_lightning.engine.data_stream import length_or_none
from det_lightning.escaping import get_logger

logger = get_logger(__name__)


class TrialOutputs(pl.loops.optimization.manual.ManualResult):
    """The outputs of a step for the hooks at the end: a dict, with any value as ``"loss"``."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any) -> TrialOutputs:
        """Keep a dict as returned, without the graph of the loss."""
        if not isinstance(training_step_output, Mapping):
            return super().from_training_step_output(training_step_output)  # type: ignore[return-value]
        outputs = dict(training_step_output)
        if isinstance(outputs.get("loss"), torch.Tensor):
            outputs["loss"] = outputs["loss"].detach()
        return cls(extra=outputs)


class TrialOptimization(pl.loops.optimization.manual._ManualOptimization):
    """Lightning's loop for manual optimization, adapted to the outputs of a trial."""

    output_result_cls = TrialOutputs


def _draw(dataloader_iter: Any, items: Iterator[tuple[Any, int, int]]) -> Any:
    """Return the next batch of ``items`` as the current batch of the hooks, without counting a fetch."""
    fetcher = dataloader_iter.data_fetcher
    counted = fetcher.iterator, fetcher.fetched, fetcher.done
    fetcher.iterator = items
    fetcher.done = False
    try:
        batch, *_ = next(dataloader_iter)
        return batch
    finally:
        fetcher.iterator, fetcher.fetched, fetcher.done = counted


def show_batch_index(dataloader_iter: Any, batch_idx: int) -> None:
    """Make Lightning pass ``batch_idx``, and no batch, to callbacks at the end of the current step."""
    _draw(dataloader_iter, iter([(None, batch_idx, 0)]))


@dataclasses.dataclass(frozen=True)
class TrialCalls:
    """Functions of a trial that the loops of a trainer call, if not None.

    Attributes:
        next_batch: returns each training batch, and the index in the epoch, before the first hook of the step.
        begin_validation: returns the batches of a validation, at most as many as the argument says; each is drawn
            before the first hook of its step.
        after_training_step, after_validation_step: called after the hooks at the end of a step.
        after_validation: called after the hooks at the end of a validation.
    """

    next_batch: Callable[[], tuple[Any, int]] | None = None
    begin_validation: Callable[[int | None], Iterator[Any]] | None = None
    after_training_step: Callable[[], None] | None = None
    after_validation_step: Callable[[], None] | None = None
    after_validation: Callable[[], None] | None = None


class TrialEpochLoop(pl.loops.training_epoch_loop._TrainingEpochLoop):
    """Lightning's loop over an epoch, without an exchange between the ranks at the beginning of a step.

    Attributes:
        validation_due: whether Lightning validates after the current step; None leaves the answer to Lightning's flags.
        calls: functions of a trial.
        shown: the batch from ``calls.next_batch`` during a step.
    """

    validation_due: bool | None = None
    calls = TrialCalls()
    shown: Any = None

    def __init__(self, trainer: pl.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.manual_optimization = TrialOptimization(trainer)

    @contextlib.contextmanager
    def counting_from_one(self) -> Iterator[None]:
        """Let callbacks and modules log in the block as if Lightning counted batches from 1, not from 0."""
        self._batches_that_stepped -= 1
        try:
            yield
        finally:
            self._batches_that_stepped += 1

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: the ranks agree on a request to end at the trial's boundaries."""

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return super()._should_check_val_fx(data_fetcher) if self.validation_due is None else self.validation_due

    def advance(self, data_fetcher: Any) -> None:
        """Run a step; warn if a hook has ended the epoch."""
        try:
            self._advance(data_fetcher)
        except StopIteration:
            if self.calls.after_training_step is not None and self._has_skipped():
                logger.warning(
                    "on_train_batch_start() returned -1, which ends an epoch of Lightning. An epoch of a trial has "
                    "all of its batches in any case, so the trial goes on with the same batch."
                )
            raise
        if self.calls.after_training_step is not None:
            self.calls.after_training_step()

    def _has_skipped(self) -> bool:
        counts: Any = self.batch_progress.current
        return bool(counts.ready > counts.started)

    def _advance(self, data_fetcher: Any) -> None:
        if self.calls.next_batch is None:
            super().advance(data_fetcher)
            return
        items = ((batch, batch_idx, 0) for batch, batch_idx in iter(self.calls.next_batch, None))
        self.shown = _draw(data_fetcher.iterator_wrapper, items)
        try:
            super().advance(data_fetcher)
        finally:
            self.shown = None
            counted = data_fetcher.fetched, data_fetcher.done
            data_fetcher.reset()  # the batch is no longer needed, and may be large
            data_fetcher.fetched, data_fetcher.done = counted


class _Shown(Iterator[tuple[Any, int, int]]):
    """Yields batches as Lightning does, with their index and that of the only loader, and keeps the latest batch."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = enumerate(batches)
        self.latest: Any = None

    def __next__(self) -> tuple[Any, int, int]:
        batch_idx, self.latest = next(self._batches)
        return self.latest, batch_idx, 0


class TrialEvaluationLoop(pl.loops.evaluation_loop._EvaluationLoop):
    """Lightning's loop over validation data, with functions of a trial as ``calls``."""

    calls = TrialCalls()

    @classmethod
    def adapt(cls, loop: Any) -> TrialEvaluationLoop:
        """Return a loop for trials with the state of one of Lightning's loops."""
        made = cls(loop.trainer, TrainerFn.VALIDATING, RunningStage.VALIDATING)
        vars(made).update(vars(loop))
        return made

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if self.calls.begin_validation is not None:
            fetcher = dataloader_iter.data_fetcher
            if not isinstance(fetcher.iterator, _Shown):
                limit = read_validation_limit(self.trainer, dataloader_iter)
                fetcher.iterator = _Shown(self.calls.begin_validation(limit))
            batch, batch_idx, dataloader_idx = next(dataloader_iter)  # at the end of the data a StopIteration
            self.batch_progress.is_last_batch = dataloader_iter.done
        super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        if self.calls.after_validation_step is not None:
            self.calls.after_validation_step()

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        super()._on_evaluation_end(*args, **kwargs)
        if self.calls.after_validation is not None:
            self.calls.after_validation()


class TrialCheckpointConnector(CheckpointConnector):
    """Lightning's checkpoints, with the trial inside, regardless of overridden hooks."""

    def dump_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Lightning's checkpoint with the trial."""
        checkpoint: dict[str, Any] = super().dump_checkpoint(*args, **kwargs)
        add = getattr(self.trainer.lightning_module, "add_trial", None)
        if add is not None:
            add(checkpoint)
        return checkpoint

    def restore_model(self) -> None:
        """Give the trial its part of a checkpoint, then let Lightning restore the rest of the module."""
        take = getattr(self.trainer.lightning_module, "take_trial", None)
        if self._loaded_checkpoint and take is not None:
            take(self._loaded_checkpoint)
        super().restore_model()


class TrialLoggerConnector(LoggerConnector):
    """Decides when callbacks and modules log; in a trial's run by the number of the batch."""

    @property
    def should_update_logs(self) -> bool:
        """Whether callbacks and modules log in this step."""
        loop = self.trainer.fit_loop.epoch_loop
        if not isinstance(loop, TrialEpochLoop) or loop.validation_due is None:
            return super().should_update_logs
        with loop.counting_from_one():
            return super().should_update_logs


class _Length:
    """Stands in for a loader, since the trial's driver draws the batches itself."""

    def __init__(self, shown: Any) -> None:
        self._length = length_or_none(shown)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The data have no length.")
        return max(1, self._length)  # Lightning would skip the validation on a rank without batches

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class HeldData(pl.utilities.combined_loader.CombinedLoader):
    """The data of a trial's run: lengths for Lightning's loops, and ``shown`` for callbacks."""

    def __init__(self, shown: Any, mode: Any) -> None:
        super().__init__(shown, mode)
        self._shown = shown
        self.flattened = [_Length(one) for one in self.flattened]

    @property
    def iterables(self) -> Any:
        """The loader, or the collection with the loader that the call was given."""
        return self._shown


class TrialDataSource(DataLoaderSource):
    """The data of one of Lightning's loops, for modules with or without a trial."""

    def dataloader(self) -> Any:
        """Return the data; a module with a trial begins to draw first."""
        begin = getattr(self.instance, "begin_data", None)
        if begin is None:
            return super().dataloader()
        begin(self.name)
        shown = super().dataloader()
        if isinstance(shown, list) and not shown:
            return shown  # there is no validation
        return HeldData(shown, "max_size_cycle" if self.name == "train_dataloader" else "sequential")


def use_trial_loops(trainer: Any) -> None:
    """Replace the loops of a trainer and their data, the log (batches count from 1), and the checkpoints."""
    before = trainer.fit_loop.epoch_loop
    if isinstance(before, TrialEpochLoop):
        return
    loop = TrialEpochLoop(trainer, before.min_steps, before.max_steps)
    loop.val_loop = TrialEvaluationLoop.adapt(before.val_loop)
    trainer.fit_loop.epoch_loop = loop
    trainer.validate_loop = TrialEvaluationLoop.adapt(trainer.validate_loop)
    for owner in (trainer.fit_loop, loop.val_loop, trainer.validate_loop):
        owner._data_source = TrialDataSource(**vars(owner._data_source))
    connectors: dict[str, Any] = {
        "_logger_connector": TrialLoggerConnector(trainer),
        "_checkpoint_connector": TrialCheckpointConnector(trainer),
    }
    for name, connector in connectors.items():
        vars(connector).update(vars(getattr(trainer, name)))
        setattr(trainer, name, connector)


def allow_validation(trainer: pl.Trainer, due: bool | None) -> None:
    """Choose whether Lightning validates after the current step: True, False, or None for the trainer's flags.

    The trainer's flags stay as they are, since a ``ModelCheckpoint`` decides by them when to save.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop.validation_due = due


def use_calls(trainer: pl.Trainer, calls: TrialCalls) -> None:
    """Let the loops of a trainer call functions, after :func:`use_trial_loops`."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    loops: list[Any] = [epoch_loop, epoch_loop.val_loop, trainer.validate_loop]
    for loop in loops:
        loop.calls = calls


def get_shown_batch(dataloader_iter: Any) -> Any:
    """Return the validation batch of the current step, as shown to the hooks."""
    return dataloader_iter.data_fetcher.iterator.latest


def read_validation_limit(trainer: pl.Trainer, dataloader_iter: Any) -> int | None:
    """Return the maximum number of batches in the current validation, or None for all batches."""
    flags: Any = trainer  # mypy does not see attributes set by Lightning's connectors
    if isinstance(flags.limit_val_batches, float) and flags.limit_val_batches == 1.0:
        return None  # a loader may have more batches than len(loader)
    (limit,) = dataloader_iter.data_fetcher.combined_loader.limits
    return None if math.isinf(limit) else limit
