"""One run of a trial: resuming, batches, workloads and boundaries. A RunDriver calls it from Lightning's hooks.

Change here: a warning about settings at the start or the resume of a run is an entry of ``_warn_of_settings``.
One about periods or the length asks a method of ``Schedule`` in ``engine/schedule.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format.content import CheckpointContent, TrialState
from det_lightning.checkpoint.format.layout import RESUME_FILE, modernize
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.core._task import current_task
from det_lightning.engine.boundary import (
    BoundaryExchange,
    Reporter,
    RunLog,
    RunOptions,
    add_position,
)
from det_lightning.engine.data_stream import LoaderFactory, TrialData
from det_lightning.engine.metrics import average_metrics
from det_lightning.engine.schedule import Action, BoundaryActions, Due, Schedule
from det_lightning.engine.train_and_evaluate import Evaluation, Training, TrialEvents, require_trainable
from det_lightning.escaping import get_logger
from det_lightning.hyperparameters import flatten
from det_lightning.masking import is_masked
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import ExternalStateTrial, PyTorchTrial, original_trial
from det_lightning.pytorch._random_state import capture_rng, require_rng, restore_rng
from det_lightning.pytorch._weights import load_resume_state, load_state
from det_lightning.pytorch._wrapped_parts import find_unwrapped_parameters, find_unwrapped_schedulers
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class StateBeforeValidation:
    """The random state, the loaders' positions, and ``has_validated`` before a validation that a longer run would not
    make.
    """

    rng: dict[str, Any]
    positions: dict[str, Any]
    has_validated: bool


class TrialRun:
    """Trains and validates a trial over one run; ``data`` are the loaders, from :meth:`start_up` on.

    Attributes:
        original: the user's trial; ``trial`` may be an adapter of a legacy trial.
        has_validated: whether a validation has begun, in this run or before.
        before_final_validation: the state before the final validation.
    """

    data: TrialData

    def __init__(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        schedule: Schedule,
        reporters: list[Reporter],
        options: RunOptions,
    ) -> None:
        self.trial = trial
        self.original = original = original_trial(trial)
        self.context = context
        self.schedule = schedule
        self.options = options
        resumed = options.resumed
        self.state = TrialState() if resumed is None else resumed.trial_state
        self.evaluation = Evaluation(trial, original, context, schedule.test_mode, options.keeps_validation_metrics)
        self._at_end = contextlib.ExitStack()
        self.training = Training(trial, original, context, options.keeps_training_metrics)
        self._log = RunLog(original, context)
        self._in_workload = False
        self._due: list[Due] = []
        self.has_validated = resumed is not None and resumed.resume is not None and resumed.resume.has_validated
        self.before_final_validation: StateBeforeValidation | None = None
        self.exchange = BoundaryExchange(context, options)
        self.early_end = self.exchange.early_end
        self._actions = BoundaryActions(schedule, self.state, self.early_end.agree)
        self._validates_in_step = False
        self.events = TrialEvents(trial.build_callbacks())
        self._reporters = reporters
        require_trainable(trial, original, context)

    # Beginning and end

    def start_up(self, loaders: LoaderFactory) -> None:
        """Notify the callbacks, and build the loaders."""
        resumed = self.options.resumed
        self._at_end.callback(self.context.update_hooks.clear)
        self.events.attach(self.context.update_hooks)
        self.context.position.batch_idx = None
        self.context.position.initial_batch = self.state.batches_trained
        require_same_checkpoint(self.context.distributed, resumed)
        self.context.distributed.name_progress(self._describe_progress)
        self._at_end.callback(self.context.distributed.name_progress, str)
        for callback in self.events.callbacks.values():
            callback.on_trial_startup(self.state.batches_trained, None if resumed is None else resumed.name)
            self._at_end.callback(callback.on_trial_shutdown)
        if isinstance(self.trial, ExternalStateTrial):
            files = None if resumed is None else resumed.directory
            exact = resumed is not None and resumed.resume is not None
            self.trial.begin_run(files, self.state.batches_trained, exact)
        by_batch = self.evaluation.by_batch
        self.data = TrialData(loaders, self.context, by_batch, self.options, self.has_validated)
        self._at_end.callback(lambda: self.data.close(self.state.batches_trained))
        self._validates_in_step = by_batch and self.data.has_even_validation()
        if resumed is not None and not resumed.epochs_known:
            self.state.epochs_trained = self.state.batches_trained // self.data.epoch_len

    def begin_training(self) -> None:
        """Load the checkpoint, if any, and notify the callbacks."""
        self.context.optimizer_steps = 0
        resumed = self.options.resumed
        if resumed is not None:
            apply_checkpoint(resumed, self.context, self.events)
            self.data.restore_validation()
        self.context.backend.placement.begin_training()
        self.events.emit("on_training_start")
        resume = None if resumed is None else resumed.resume
        self.context.wrapped.begin_training({} if resume is None else resume.requires_grad)
        self.context.wrapped.is_complete = True
        self._at_end.callback(setattr, self.context.wrapped, "is_complete", False)
        self._log.begin(self.state.batches_trained, resumed)
        _warn_of_settings(self.original, self.context, self.schedule, self.state, resumed)
        self._due = self._find_left_actions()
        self._actions.begin(self._due)

    def _find_left_actions(self) -> list[Due]:
        """Return the actions still due where a run was saved before its validation; nothing elsewhere."""
        trained = self.state.batches_trained
        resumed = self.options.resumed
        is_exact = resumed is not None and resumed.resume is not None
        if not is_exact or not self.schedule.validates or trained in (0, self.state.last_val):
            return []
        due = self.schedule.due(trained, self.data.epoch_len)
        return [one for one in due if one in (Due.VALIDATE, Due.CHECKPOINT)] if Due.VALIDATE in due else []

    def shut_down(self) -> None:
        """End the loaders' workers, then notify all callbacks in reverse order, even if a callback raises."""
        self._at_end.close()

    # Training

    def train(self, batches: Iterator[Any], yields: Callable[[], bool]) -> int:
        """Train up to the next boundary or the end of the epoch; return the number of batches trained.

        ``batches`` come from ``data.prepare`` and have no end. ``yields`` is called after each batch; True ends the
        call before a boundary.
        """
        if not self._in_workload:
            self._begin_workload()
        first = self.state.batches_trained
        epoch_idx = first // self.data.epoch_len
        with self.context.distributed.in_batches():
            self._train(batches, yields)
        if self.at_epoch_end():
            self.events.emit("on_training_epoch_end", epoch_idx)
            self.state.epochs_trained += 1
        self._due = self.schedule.due(self.state.batches_trained, self.data.epoch_len)
        return self.state.batches_trained - first

    def _train(self, batches: Iterator[Any], yields: Callable[[], bool]) -> None:
        state = self.state
        position = self.context.position
        train_batch = self.training.train_batch
        stop = self._next_step_end()
        first = state.batches_trained
        epoch_idx, into_epoch = divmod(first, self.data.epoch_len)
        epoch_begin = None if into_epoch else first
        if epoch_begin is not None and isinstance(batches, map):  # map() moves a batch only on demand
            batches = itertools.chain(self._first_of_epoch(epoch_idx), batches)
            epoch_begin = None
        for batch in batches:
            position.batch_idx = batch_idx = state.batches_trained
            if batch_idx == epoch_begin:
                self.events.start_epoch(epoch_idx)
            train_batch(batch, epoch_idx, batch_idx)
            state.batches_trained = batch_idx + 1
            if batch_idx + 1 == stop or yields():
                break
        else:
            raise RuntimeError(
                f"The training loader ended after {state.batches_trained} batches. A loader that is not a "
                "det_lightning.pytorch.DataLoader must repeat its data without end, for example through "
                "det_lightning.pytorch.samplers.RepeatBatchSampler."
            )

    def _first_of_epoch(self, epoch_idx: int) -> list[Any]:
        """Fetch the first batch of an epoch, start the epoch, then move the batch; nothing if there is none."""
        fetched = [*itertools.islice(self.data.training.batches, 1)]
        if fetched:
            self.context.position.batch_idx = self.state.batches_trained
            self.events.start_epoch(epoch_idx)
        return [self.data.prepare_batch(batch) for batch in fetched]

    def _next_step_end(self) -> int:
        """Return the number of batches at the next possible boundary or at the end of the epoch."""
        trained = self.state.batches_trained
        epoch_len = self.data.epoch_len
        epoch_end = (trained // epoch_len + 1) * epoch_len
        return min(self.schedule.next_batch_to_look(trained, epoch_len), epoch_end)

    def _begin_workload(self) -> None:
        for model in self.context.models:
            model.train()
        self.context.reducers.reset_reducers()
        self.before_final_validation = None
        self._log.begin_workload()
        self._in_workload = True

    # Boundaries

    def at_boundary(self) -> bool:
        """Return whether the latest batch closed a workload."""
        return bool(self._due)

    def at_epoch_end(self) -> bool:
        """Return whether the latest batch was the last of its epoch."""
        return self.state.batches_trained % self.data.epoch_len == 0

    def end_workload(self) -> None:
        """Reduce and report the metrics of the workload."""
        if not self._in_workload:
            return
        self._in_workload = False
        overridden = self.events.find_overrides("on_training_workload_end")
        users_code_follows = self.options.hooks_follow_report or bool(overridden)
        batch_metrics = self.exchange.average(self.training.window, users_code_follows)
        avg_metrics: dict[str, Any] = average_metrics(batch_metrics)
        avg_metrics.update(self.exchange.reduce_registered(for_training=True))
        self._log.report_training(self.state.batches_trained, avg_metrics, len(batch_metrics))
        for reporter in self._reporters:
            reporter.report_training(self.state.batches_trained, avg_metrics, batch_metrics)
        add_position(avg_metrics, self.state)
        self.events.emit("on_training_workload_end", avg_metrics=avg_metrics, batch_metrics=batch_metrics)
        self._actions.begin(self._due)

    def only_reports(self) -> bool:
        """Return whether nothing but a report is due at this boundary, and no epoch or training ends."""
        return self._due == [Due.REPORT] and not self.at_epoch_end() and not self.schedule.is_complete(self.state)

    def continues(self) -> bool:
        """Return whether training goes on after a boundary with only a report; all ranks call this."""
        return self._actions.continue_after_report()

    def progress(self) -> float | None:
        """Return the trained fraction of the run's length, from 0 to 1; None for a run without a length."""
        return self.schedule.progress(self.state, self.data.epoch_len)

    def _describe_progress(self) -> str:
        evaluated = self.evaluation.batches_evaluated
        return f"after {self.state.batches_trained} batches" + (
            f" and {evaluated} of a validation" if evaluated else ""
        )

    def next_action(self) -> Action | None:
        """Return the next action of the boundary; None once training can continue."""
        action = self._actions.next()
        if action is Action.VALIDATE and Due.VALIDATE not in self._due and self.schedule.is_complete(self.state):
            self.keep_state_before_validation()
        return action

    def keep_state_before_validation(self) -> None:
        """Keep, for a resume, the state before a validation that a longer run would not make here."""
        rng = capture_rng(self.context.device)
        positions = self.data.journal.positions(self.state.batches_trained)
        self.before_final_validation = StateBeforeValidation(rng, positions, self.has_validated)

    # Validation

    def begin_validation(self) -> None:
        """Prepare reducers and models for a validation, and notify the callbacks."""
        self.has_validated = True
        self._log.begin_validation()
        self.context.reducers.reset_reducers()
        for model in self.context.models:
            model.eval()
        self.context.backend.placement.begin_validation(self._validates_in_step)
        for hook in self.events.find_overrides("on_validation_step_start"):
            hook()
        self.events.emit("on_validation_start")
        self.evaluation.begin()
        if self.evaluation.by_batch:
            self.events.emit("on_validation_epoch_start")

    def end_validation(self) -> dict[str, Any]:
        """Reduce, report and return the metrics of the validation; a smoke run skips a partial one."""
        if self.schedule.test_mode > 1 and any(self.context.distributed.allgather(self.evaluation.is_cut)):
            self.context.backend.placement.end_validation()
            self.state.last_val = self.state.batches_trained
            _report_cut_validation(self.context, self.state.batches_trained, self.evaluation.batches_evaluated)
            return {}
        evaluated = self.evaluation.batches_evaluated
        if self.evaluation.by_batch:
            metrics = self._reduce_validation()
        else:
            metrics = self.exchange.broadcast_validation(self.evaluation.full_metrics)
        metrics.update(self.exchange.reduce_registered(for_training=False))
        self.events.emit("on_validation_end", metrics)
        for hook in self.events.find_overrides("on_validation_step_end"):
            hook(metrics)
        self.context.backend.placement.end_validation()
        self.state.last_val = self.state.batches_trained
        self._log.end_validation(self.state.batches_trained, metrics, evaluated)
        for reporter in self._reporters:
            reporter.report_validation(self.state.batches_trained, metrics)
        add_position(metrics, self.state)
        return metrics

    def _reduce_validation(self) -> dict[str, Any]:
        batches = self.evaluation.close()
        self.events.emit("on_validation_epoch_end", batches)
        overriding = [
            *self.events.find_overrides("on_validation_end"),
            *self.events.find_overrides("on_validation_step_end"),
        ]
        users_code_follows = self.options.hooks_follow_validation or bool(overriding)
        return self.exchange.reduce_validation(batches, self.trial.evaluation_reducer(), users_code_follows)


def require_resumable(content: CheckpointContent) -> None:
    """Raise a CheckpointError naming missing or wrong values if a run cannot resume from the checkpoint."""
    resume = content.resume
    if resume is None:
        return
    source = content.source if content.directory is None else str(content.directory / RESUME_FILE)
    resume.require_journals(source)
    batches = resume.trial_state.get("batches_trained")
    if batches != content.trial_state.batches_trained:
        raise errors.InvalidCheckpointException(
            f"{source} belongs to another checkpoint, written after {batches} batches; this checkpoint was written "
            f"after {content.trial_state.batches_trained}."
        )
    for rank, state in enumerate(resume.rng_states):
        require_rng(state, f"{source}, of rank {rank}")
    for start in itertools.chain.from_iterable(resume.journals):
        require_rng(start["rng"], f"{source}, of the pass at batch {start['first_batch']}")


def apply_checkpoint(content: CheckpointContent, context: PyTorchTrialContext, events: TrialEvents) -> None:
    """Load everything into the trial; raise an InvalidCheckpointException naming values that do not fit."""
    loaded = content
    if content.is_sharded and not context.backend.states.is_sharded:
        loaded = safe_load.read_all_parts(content)
    state = loaded.state
    resume = loaded.resume
    source = content.source
    if resume is None and "rng_state" in state:
        require_rng(state["rng_state"], source)
    events.emit("on_checkpoint_load_start", state)
    if content.has_weights:
        modernize(state, source)
    load_state(context, events.callbacks, state, source, content.trial_class, with_weights=content.has_weights)
    if resume is not None:
        load_resume_state(context, resume, source)
    elif "rng_state" in state:
        restore_rng(state["rng_state"], context.device)
    # The state may be large, and is no longer needed.
    content.state = {}
    if content.is_sharded and content.kept is not None:
        content.kept.close()


def require_same_checkpoint(distributed: DistributedContext, content: CheckpointContent | None) -> None:
    """Raise a CheckpointError if the ranks resume from different checkpoints; all ranks must call this."""
    own = None if content is None else content.name
    found = distributed.allgather(own)
    if {*found} != {own}:
        choices = ", ".join(f"rank {rank} from {name or 'none'}" for rank, name in enumerate(found))
        raise errors.CheckpointError(
            f"The ranks resume from different checkpoints: {choices}. All ranks must see the same storage. Let one "
            "rank choose the checkpoint before the other ranks look for checkpoints."
        )


def _warn_of_settings(
    trial: object,
    context: PyTorchTrialContext,
    schedule: Schedule,
    state: TrialState,
    resumed: CheckpointContent | None,
) -> None:
    """Log the warnings of a run on the chief, after the checkpoint, if any, is loaded."""
    if context.distributed.rank != 0:
        return
    warnings = [*find_unwrapped_parameters(trial, context.wrapped), *find_unwrapped_schedulers(trial, context.wrapped)]
    if resumed is not None and (changed := _find_changed_hparams(resumed, context)):
        warnings.append(f"The hparams differ from those of checkpoint {resumed.name}: {', '.join(changed)}.")
    for period in schedule.find_periods_below_one():
        warnings.append(f"{period} is below 1, and so due every time; leave the period out for never.")
    if schedule.is_complete(state):
        length = "test_mode" if schedule.test_mode else f"max_length={schedule.max_length}"
        warnings.append(
            f"Nothing is trained: {length} is reached after {state.batches_trained} batches and {state.epochs_trained} "
            "epochs. To continue, pass a larger max_length, which counts from the first batch of the first run."
        )
    for message in warnings:
        logger.warning("%s", message)


def _find_changed_hparams(resumed: CheckpointContent, context: PyTorchTrialContext) -> list[str]:
    """Return the names of the hyperparameters that differ from those in a checkpoint, as far as it has them."""
    saved = read_settings(resumed.resume, resumed.load_data)["hparams"]
    if not isinstance(saved, dict):
        return []
    before, now = flatten(saved), flatten(context.settings.to_plain()["hparams"] or {})
    names = [name for name in {**before, **now} if not is_masked(before.get(name))]  # earlier releases masked some
    # By their text, since NaN is not equal to itself.
    return [name for name in names if repr(before.get(name)) != repr(now.get(name))]


def _report_cut_validation(context: PyTorchTrialContext, steps_completed: int, batches: int) -> None:
    """Say, in an experiment also to its runner, that a smoke run left out the rest of a validation."""
    if context.distributed.rank != 0:
        return
    message = f"This smoke run ended the validation after its first {batches} batches: there are no metrics."
    logger.warning("%s", message)
    if (task := current_task()) is not None:
        task.report("message", steps_completed, {"text": message})
