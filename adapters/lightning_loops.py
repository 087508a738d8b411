"""Lightning's loops, adapted to trials; they are not documented API, so each change has a contract test.

See ``lightning_internals`` for the other uses of undocumented API.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from det_lightning.adapters.lightning_package import CheckpointConnector, LoggerConnector, RunningStage, TrainerFn, pl

logger = logging.getLogger(__name__)


class TrialOutputs(pl.loops.optimization.manual.ManualResult):
    """What a step passes to the hooks at its end: a dict whose ``"loss"``, if any, may be anything."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any) -> TrialOutputs:
        if not isinstance(training_step_output, Mapping):
            return super().from_training_step_output(training_step_output)  # type: ignore[return-value]
        outputs = dict(training_step_output)
        if isinstance(outputs.get("loss"), torch.Tensor):
            outputs["loss"] = outputs["loss"].detach()
        return cls(extra=outputs)


class TrialOptimization(pl.loops.optimization.manual._ManualOptimization):
    """Lightning's loop for manual optimization, adapted to what a trial returns."""

    output_result_cls = TrialOutputs


def _draw(dataloader_iter: Any, items: Iterator[tuple[Any, int, int]]) -> Any:
    """Return the next batch of ``items``, which hooks now get with its index; it does not count as fetched."""
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


class TrialEpochLoop(pl.loops.training_epoch_loop._TrainingEpochLoop):
    """Lightning's loop over an epoch, but its steps begin without an exchange between the ranks.

    ``validation_due``, if set, says whether Lightning validates after the current step, whatever its flags say.
    ``next_batch``, if set, returns the batch of each step and its index in the epoch before the first hook of the step
    is called; ``shown`` is that batch until the step is over. ``after_step``, if set, is called after each step.
    """

    def __init__(self, trainer: pl.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.manual_optimization = TrialOptimization(trainer)
        self.validation_due: bool | None = None
        self.next_batch: Callable[[], tuple[Any, int]] | None = None
        self.shown: Any = None
        self.after_step: Callable[[], None] | None = None

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
        try:
            self._advance(data_fetcher)
        except StopIteration:
            if self.after_step is not None and self._has_skipped():
                logger.warning(
                    "on_train_batch_start() returned -1, which ends an epoch of Lightning. An epoch of a trial has "
                    "all of its batches in any case, so the trial goes on with the same batch."
                )
            raise
        if self.after_step is not None:
            self.after_step()

    def _has_skipped(self) -> bool:
        counts: Any = self.batch_progress.current
        return bool(counts.ready > counts.started)

    def _advance(self, data_fetcher: Any) -> None:
        if self.next_batch is None:
            super().advance(data_fetcher)
            return
        items = ((batch, batch_idx, 0) for batch, batch_idx in iter(self.next_batch, None))
        self.shown = _draw(data_fetcher.iterator_wrapper, items)
        try:
            super().advance(data_fetcher)
        finally:
            self.shown = None
            counted = data_fetcher.fetched, data_fetcher.done
            data_fetcher.reset()  # the batch is no longer needed, and may be large
            data_fetcher.fetched, data_fetcher.done = counted


class _Prepared(Iterator[tuple[Any, int, int]]):
    """Prepares the batches of ``items``, which come with their own index and their loader's; keeps the latest."""

    def __init__(self, items: Iterator[tuple[Any, int, int]], prepare: Callable[[Any], Any]) -> None:
        self._items = items
        self._prepare = prepare
        self.latest: Any = None

    def __next__(self) -> tuple[Any, int, int]:
        batch, batch_idx, dataloader_idx = next(self._items)
        self.latest = self._prepare(batch)
        return self.latest, batch_idx, dataloader_idx


class TrialEvaluationLoop(pl.loops.evaluation_loop._EvaluationLoop):
    """Lightning's loop over validation data.

    If ``prepare_batch`` is set, the batch of each step is taken and prepared before the first hook of the step.
    ``after_step`` and ``after_validation``, if set, are called after the hooks at the end of a step, and of all.
    """

    prepare_batch: Callable[[Any], Any] | None = None
    after_step: Callable[[], None] | None = None
    after_validation: Callable[[], None] | None = None

    @classmethod
    def adapt(cls, loop: Any) -> TrialEvaluationLoop:
        made = cls(loop.trainer, TrainerFn.VALIDATING, RunningStage.VALIDATING)
        vars(made).update(vars(loop))
        return made

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if self.prepare_batch is not None:
            fetcher = dataloader_iter.data_fetcher
            if not isinstance(fetcher.iterator, _Prepared):
                fetcher.iterator = _Prepared(fetcher.iterator, self.prepare_batch)
            batch, batch_idx, dataloader_idx = next(dataloader_iter)  # at the end of the data a StopIteration
            self.batch_progress.is_last_batch = dataloader_iter.done
        super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        if self.after_step is not None:
            self.after_step()

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        super()._on_evaluation_end(*args, **kwargs)
        if self.after_validation is not None:
            self.after_validation()


class TrialCheckpointConnector(CheckpointConnector):
    """Lightning's checkpoints, with the trial in them, whatever hooks a module overrides."""

    def dump_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().dump_checkpoint(*args, **kwargs)
        add = getattr(self.trainer.lightning_module, "add_trial", None)
        if add is not None:
            add(checkpoint)
        return checkpoint

    def restore_model(self) -> None:
        take = getattr(self.trainer.lightning_module, "take_trial", None)
        if self._loaded_checkpoint and take is not None:
            take(self._loaded_checkpoint)
        super().restore_model()


class TrialLoggerConnector(LoggerConnector):
    """Decides when callbacks and modules log, in a trial's run by the number of the batch, which is also the step."""

    @property
    def should_update_logs(self) -> bool:
        loop = self.trainer.fit_loop.epoch_loop
        if not isinstance(loop, TrialEpochLoop) or loop.validation_due is None:
            return super().should_update_logs
        with loop.counting_from_one():
            return super().should_update_logs


def use_trial_loops(trainer: Any) -> None:
    """Replace the loops of a trainer, its logs, which then count batches from 1, and its checkpoints."""
    before = trainer.fit_loop.epoch_loop
    if isinstance(before, TrialEpochLoop):
        return
    loop = TrialEpochLoop(trainer, before.min_steps, before.max_steps)
    loop.val_loop = TrialEvaluationLoop.adapt(before.val_loop)
    trainer.fit_loop.epoch_loop = loop
    trainer.validate_loop = TrialEvaluationLoop.adapt(trainer.validate_loop)
    connectors: dict[str, Any] = {
        "_logger_connector": TrialLoggerConnector(trainer),
        "_checkpoint_connector": TrialCheckpointConnector(trainer),
    }
    for name, connector in connectors.items():
        vars(connector).update(vars(getattr(trainer, name)))
        setattr(trainer, name, connector)


def allow_validation(trainer: pl.Trainer, due: bool | None) -> None:
    """Let Lightning validate after the current step, or not, or as its flags say; for a :class:`TrialEpochLoop`.

    The flags stay as they are, because callbacks read them: a ``ModelCheckpoint`` chooses by them when it saves.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop.validation_due = due


def show_batches(
    trainer: pl.Trainer,
    next_training_batch: Callable[[], tuple[Any, int]] | None,
    prepare_validation_batch: Callable[[Any], Any] | None,
) -> None:
    """Show each batch to the hooks at the start of its step, or none if None; call it after :func:`use_trial_loops`.

    The first function returns a batch and its index in the epoch; the second one prepares what Lightning has fetched.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop.next_batch = next_training_batch
    loops: list[Any] = [epoch_loop.val_loop, trainer.validate_loop]
    for loop in loops:
        loop.prepare_batch = prepare_validation_batch


def call_afterwards(
    trainer: pl.Trainer,
    training_step: Callable[[], None] | None,
    validation_step: Callable[[], None] | None,
    validation: Callable[[], None] | None,
) -> None:
    """Let functions be called after each step and each validation, when all hooks at its end were called."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop.after_step = training_step
    loops: list[Any] = [epoch_loop.val_loop, trainer.validate_loop]
    for loop in loops:
        loop.after_step = validation_step
        loop.after_validation = validation


def get_shown_batch(dataloader_iter: Any) -> Any:
    """Return the validation batch that was shown to the hooks at the start of the current step."""
    return dataloader_iter.data_fetcher.iterator.latest


def read_validation_limit(trainer: pl.Trainer, dataloader_iter: Any) -> int | None:
    """Return how many batches the current validation takes from its loader at most; None for all of them."""
    flags: Any = trainer  # mypy does not see what Lightning's connectors set
    if isinstance(flags.limit_val_batches, float) and flags.limit_val_batches == 1.0:
        return None  # a loader may have more batches than its length says
    (limit,) = dataloader_iter.data_fetcher.combined_loader.limits
    return None if math.isinf(limit) else limit
