"""One run of a trial: its batches, workloads and boundaries. Imports no Lightning; a TrialModule drives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent, TrialState
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.storage.background import tensors_in
from det_lightning.engine.boundary import Action, BoundaryActions
from det_lightning.engine.data_stream import TrialData
from det_lightning.engine.events import TrialEvents
from det_lightning.engine.metrics import (
    MetricWindow,
    average_metrics,
    average_over_ranks,
    reduce_validation_metrics,
    to_numpy,
)
from det_lightning.engine.requirements import require_trainable
from det_lightning.engine.resume import (
    adapt_to,
    apply,
    collect_resume_state,
    journal_of,
    load_data_of,
    require_same_checkpoint,
)
from det_lightning.engine.schedule import Boundary, Schedule
from det_lightning.engine.stopping import EarlyEnd, StopRequest
from det_lightning.engine.validation import Evaluation
from det_lightning.pytorch._legacy_trial import original_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial
from det_lightning.pytorch._random_state import capture_rng
from det_lightning.pytorch._weights import collect_rest, collect_weights


class Reporter(Protocol):
    """Takes the metrics of a run, on the chief."""

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Take the metrics of a workload that ended after ``steps_completed`` batches."""

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Take the metrics of a validation after ``steps_completed`` batches."""


class TrialRun:
    """Trains and validates a trial over one run.

    Args:
        trial: what is trained.
        context: the trial's.
        schedule: when boundaries lie.
        reporters: who is told of the metrics.
        resume: the checkpoint that the run goes on from; None to begin with the trial as it is.
        stop_request: may end the run from outside; None if nothing does.

    Attributes:
        early_end: whether it ends before its length is reached.

    Raises:
        InvalidExperimentException: the trial wraps no model or no optimizer, or does not override exactly one of
            ``evaluate_batch`` and ``evaluate_full_dataset``; all that is wrong is named.
    """

    def __init__(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        schedule: Schedule,
        reporters: list[Reporter],
        resume: CheckpointContent | None = None,
        stop_request: StopRequest | None = None,
    ) -> None:
        self.trial = trial
        self.context = context
        self.schedule = schedule
        if resume is not None:
            adapt_to(resume, context.distributed.size)
        self.state = TrialState() if resume is None else resume.trial_state
        self.evaluation = Evaluation(trial, context, schedule.test_mode)
        self._data: TrialData | None = None
        self._resume = resume
        self._reporters = reporters
        self._window = MetricWindow()
        self._counts_records = type(original_trial(trial)).get_batch_length is not PyTorchTrial.get_batch_length
        self._in_workload = False
        self._due: list[Boundary] = []
        self._rng_before_final_validation: dict[str, Any] | None = None
        self.early_end = EarlyEnd(context, stop_request)
        self._actions = BoundaryActions(schedule, self.state, self.early_end.agree)
        self._validates_in_step = False
        self.events = TrialEvents(trial.build_callbacks())
        require_trainable(trial, context)

    # Beginning and end

    def start_up(self, epoch_limit: float = 1.0) -> None:
        """Tell the callbacks and build the loaders.

        Args:
            epoch_limit: see :class:`TrialData`.
        """
        self.context.before_step[:] = self.events.overriding("on_before_optimizer_step")
        self.context.optimizer_steps = 0
        self.context.position.batch_idx = None
        self.context.position.initial_batch = self.state.batches_trained
        require_same_checkpoint(self.context.distributed, self._resume)
        self.events.start_up(self.state.batches_trained, None if self._resume is None else self._resume.name)
        journal = journal_of(self._resume, self.context.distributed.rank)
        self._data = TrialData(self.trial, self.context, self.evaluation.by_batch, journal, epoch_limit)
        self._validates_in_step = self.evaluation.by_batch and self._data.has_even_validation()
        if self._resume is not None and not self._resume.epochs_known:
            self.state.epochs_trained = self.state.batches_trained // self.context.position.epoch_length()

    @property
    def data(self) -> TrialData:
        """The loaders.

        Raises:
            InternalException: they are not built yet.
        """
        if self._data is None:
            raise errors.InternalException("The loaders are built by start_up().")
        return self._data

    def begin_training(self) -> None:
        """Load the checkpoint, if there is one, and tell the callbacks that training starts."""
        if self._resume is not None:
            apply(self._resume, self.context, self.events)
        self.context.backend.phases.begin_training()
        self.events.emit("on_training_start")
        self._actions.begin([])

    def is_complete(self) -> bool:
        """Tell whether training has reached its length."""
        return self.schedule.is_complete(self.state)

    def shut_down(self) -> None:
        """End the loaders' workers, then tell the callbacks."""
        if self._data is not None:
            self._data.close()
        self.events.shut_down()

    # Training

    def train(self, batches: Iterator[Any], yields: Callable[[], bool]) -> int:
        """Train up to the next boundary or the end of the epoch, or until the driver wants control back.

        Args:
            batches: the rest of an epoch of a :class:`TrainStream`.
            yields: asked after each batch whether the driver wants control back though no boundary was reached.

        Returns:
            The number of batches trained on.
        """
        if not self._in_workload:
            self._begin_workload()
        state = self.state
        position = self.context.position
        train_batch = self._train_batch
        epoch_len = position.epoch_length()
        first = state.batches_trained
        epoch_idx, into_epoch = divmod(first, epoch_len)
        epoch_end = first - into_epoch + epoch_len
        stop = min(self.schedule.next_batch_to_look(first, epoch_len), epoch_end)
        for batch in batches:
            position.batch_idx = batch_idx = state.batches_trained
            if into_epoch == 0 and batch_idx == first:
                self.events.start_epoch(epoch_idx)
            train_batch(batch, epoch_idx, batch_idx)
            state.batches_trained = batch_idx + 1
            if batch_idx + 1 == stop or yields():
                break
        if state.batches_trained == epoch_end:
            self.events.emit("on_training_epoch_end", epoch_idx)
            state.epochs_trained += 1
        self._due = self.schedule.due(state.batches_trained, epoch_len)
        return state.batches_trained - first

    def _begin_workload(self) -> None:
        for model in self.context.models:
            model.train()
        self.context.reducers.reset_reducers()
        self._in_workload = True

    def _train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> None:
        context = self.context
        gradients = context.precision.path
        if gradients.exchanges:
            gradients.begin_batch(context.is_update_batch())
        if context.experimental.auto_to_device:
            batch = context.to_device(batch)
        metrics: Any = self.trial.train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
        if (scaling := context.precision.scaling) is not None:
            scaling.end_batch()
        if isinstance(metrics, torch.Tensor):
            metrics = {"loss": metrics}
        elif not isinstance(metrics, dict):
            raise TypeError(
                f"{type(self.trial).__name__}.train_batch() must return a dict of metrics or one tensor; it returned "
                f"{metrics!r} for batch {batch_idx}."
            )
        if context.lr_schedulers:
            self._step_lr_schedulers(batch_idx)
        self._window.add(metrics)
        if self._counts_records:
            # A trial may keep count of its records in there.
            self.trial.get_batch_length(batch)

    def _step_lr_schedulers(self, batch_idx: int) -> None:
        context = self.context
        if not context.is_update_batch():
            return
        epoch_len = context.position.epoch_length()
        for scheduler in context.lr_schedulers:
            for _ in range(scheduler.steps_after(batch_idx, epoch_len, context.aggregation_frequency)):
                scheduler.step()

    # Boundaries

    def at_boundary(self) -> bool:
        """Tell whether the latest batch closed a workload."""
        return bool(self._due)

    def at_epoch_end(self) -> bool:
        """Tell whether the latest batch was the last of its epoch."""
        return self.state.batches_trained % self.context.position.epoch_length() == 0

    def latest_batch_of_epoch(self) -> int:
        """Return the index, within its epoch, of the latest batch."""
        return (self.state.batches_trained - 1) % self.context.position.epoch_length()

    def end_workload(self) -> None:
        """Reduce and report the metrics of the workload."""
        if not self._in_workload:
            return
        self._in_workload = False
        batch_metrics = average_over_ranks(self._window.close(), self.context.distributed)
        avg_metrics: dict[str, Any] = average_metrics(batch_metrics)
        avg_metrics.update(to_numpy(self.context.reducers.reduce_metrics(for_training=True)))
        for reporter in self._reporters:
            reporter.report_training(self.state.batches_trained, avg_metrics, batch_metrics)
        self._add_position(avg_metrics)
        self.events.emit("on_training_workload_end", avg_metrics=avg_metrics, batch_metrics=batch_metrics)
        self._actions.begin(self._due)

    def next_action(self) -> Action | None:
        """Return what is to be done next before training goes on; None when it can."""
        action = self._actions.next()
        if action is Action.VALIDATE and Boundary.VALIDATE not in self._due and self.is_complete():
            # A run that goes on from here with a greater length would not have validated: it needs this state.
            self._rng_before_final_validation = capture_rng(self.context.device)
        return action

    # Validation

    def begin_validation(self) -> None:
        """Bring reducers and models into the state for a validation, and tell the callbacks."""
        self.context.reducers.reset_reducers()
        for model in self.context.models:
            model.eval()
        self.context.backend.phases.begin_validation(self._validates_in_step)
        for hook in self.events.overriding("on_validation_step_start"):
            hook()
        self.events.emit("on_validation_start")
        self.evaluation.begin()
        if self.evaluation.by_batch:
            self.events.emit("on_validation_epoch_start")

    def end_validation(self) -> dict[str, Any]:
        """Reduce and report the metrics of the validation; return them."""
        if self.evaluation.by_batch:
            batches = self.evaluation.close()
            self.events.emit("on_validation_epoch_end", batches)
            metrics = reduce_validation_metrics(batches, self.trial.evaluation_reducer(), self.context.distributed)
        else:
            metrics = self.context.distributed.broadcast(self.evaluation.full_dataset_metrics())
        metrics.update(to_numpy(self.context.reducers.reduce_metrics(for_training=False)))
        self.events.emit("on_validation_end", metrics)
        for hook in self.events.overriding("on_validation_step_end"):
            hook(metrics)
        self.context.backend.phases.end_validation()
        self.state.last_val = self.state.batches_trained
        for reporter in self._reporters:
            reporter.report_validation(self.state.batches_trained, metrics)
        self._add_position(metrics)
        return metrics

    def _add_position(self, metrics: dict[str, Any]) -> None:
        metrics.setdefault("batches", self.state.batches_trained)
        metrics.setdefault("epochs", self.state.epochs_trained)

    # Checkpoints

    def checkpoint_is_current(self) -> bool:
        """Tell whether nothing was trained since the latest checkpoint."""
        return self.state.last_ckpt == self.state.batches_trained

    def checkpoint_content(self) -> CheckpointContent | None:
        """Return the content of a checkpoint, with a state as the callbacks leave it; None but on the chief.

        All ranks have to call it, for what is sharded or each rank has of its own is gathered.
        """
        context = self.context
        resume = self._resume_state()
        chief = context.distributed.rank == 0
        sharded = context.backend.states.is_sharded
        weights = collect_weights(context) if chief or sharded else {}
        if not chief:
            return None
        copies = list(tensors_in(weights)) if sharded else []
        state = {**weights, **collect_rest(context, self.events.callbacks, capture_rng(context.device))}
        self.events.emit("on_checkpoint_save_start", state)
        return dataclasses.replace(self._content_of(state, resume), copies=copies)

    def content_for_lightning(self) -> CheckpointContent:
        """Return what Lightning does not know of: callbacks, random state, position in the data.

        All ranks have to call it.
        """
        rest = collect_rest(self.context, self.events.callbacks, capture_rng(self.context.device))
        return dataclasses.replace(self._content_of(rest, self._resume_state()), has_weights=False)

    def _content_of(self, state: dict[str, Any], resume: ResumeState) -> CheckpointContent:
        load_data = load_data_of(original_trial(self.trial), resume.settings or {})
        return CheckpointContent(state, dataclasses.replace(self.state), load_data, resume)

    def _resume_state(self) -> ResumeState:
        rng = self._rng_before_final_validation or capture_rng(self.context.device)
        journal = self.data.journal.state_dict(self.state.batches_trained * self.context.distributed.size)
        return collect_resume_state(self.context, self.state, rng, journal)
