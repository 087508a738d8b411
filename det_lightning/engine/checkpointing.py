"""The checkpoints of a run: their content, whether one follows a validation by the policy, and which is the best."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import (
    LIGHTNING_FILE,
    RESUME_FILE,
    SHARDED_STATE_FILE,
    STATE_FILE,
    digest_file,
    make_load_data,
)
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.retention.policy import CheckpointPolicy
from det_lightning.checkpoint.retention.trial_checkpoints import (
    TrialCheckpoints,
    TrialLock,
    lock_trial,
    remove_dead_locks,
)
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import new_id
from det_lightning.checkpoint.storage.writing import (
    WORKER_DIED,
    CheckpointQueue,
    ReportWritten,
    defer_signal,
    iterate_tensors,
)
from det_lightning.checkpoint.unsafe_values import UnsafeValues, list_parts
from det_lightning.core._reports import as_float
from det_lightning.engine.run import StateBeforeValidation, TrialRun
from det_lightning.engine.shard_writing import SharedCheckpoint, take_shards_of_run
from det_lightning.escaping import get_logger
from det_lightning.pytorch._pytorch_trial import ExternalStateTrial
from det_lightning.pytorch._random_state import capture_rng
from det_lightning.pytorch._weights import collect_rest, collect_resume_state, collect_weights
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)

# How long the end of a run waits for the cleaning thread: a run that finds nothing to remove ends in no request.
_LAST_WAIT_S = 1.0
# Files with objects of users' code; other files hold numbers, texts and tensors only.
_FILES_WITH_OBJECTS = (STATE_FILE, SHARDED_STATE_FILE, RESUME_FILE, LIGHTNING_FILE)


@dataclasses.dataclass(frozen=True)
class Saving:
    """How to write the checkpoints of a run, and the names for their metadata; see ``DeterminedCheckpoint``.

    The last three are called on the chief by the thread that writes: before a checkpoint is complete, with the SHA-256
    of the state files with objects; once it is complete, before others are deleted; and after others are deleted.
    """

    code: CodeCopier | None = None
    in_background: bool = False
    experiment: str | None = None
    trial: str | None = None
    job: str | None = None
    best_elsewhere: Callable[[], float | None] | None = None
    on_complete: Callable[[str, int], None] | None = None
    on_begin: Callable[[str, int, CheckpointStorage, list[str]], None] | None = None
    on_written: Callable[[str, int], None] | None = None
    on_delete: Callable[[str], None] | None = None


class RunContent:
    """Collects the content of a run's checkpoints. All ranks call the same methods to gather state."""

    def __init__(self, run: TrialRun) -> None:
        self._run = run
        self._known_losses: set[str] = set()  # named in a warning
        self._described = ""  # the settings from which the next two were made
        self._settings: dict[str, Any] = {}
        self._load_data: dict[str, Any] = {}
        self._follow_settings()

    def collect(self) -> CheckpointContent | None:
        """Return the content of a checkpoint, with changes by the trial's callbacks.

        Ranks other than the chief get None, or only their part of a sharded checkpoint.
        """
        run = self._run
        context = run.context
        states = context.backend.states
        chief = context.distributed.rank == 0
        files = run.trial.collect_files() if isinstance(run.trial, ExternalStateTrial) else None
        rng = capture_rng(context.device)
        shards: dict[str, torch.Tensor] = {}
        if states.writes_shards:
            with states.in_shards():
                weights, resume = take_shards_of_run(collect_weights(context), self._resume_state(rng), shards)
        else:
            resume = self._resume_state(rng)
            weights = collect_weights(context) if chief or states.is_sharded else {}
        if not chief:
            part = CheckpointContent({}, dataclasses.replace(run.state), is_sharded=True, shards=shards)
            return part if states.writes_shards else None
        gathered = list(iterate_tensors(weights)) if states.is_sharded and not states.writes_shards else []
        state = {**weights, **collect_rest(context, run.events.callbacks, dict(rng))}
        run.events.emit("on_checkpoint_save_start", state)
        self._follow_settings()
        content = CheckpointContent(state, dataclasses.replace(run.state), self._load_data, resume, copies=gathered)
        content.is_sharded = states.writes_shards
        content.shards = shards
        if isinstance(run.trial, ExternalStateTrial):
            content.files = files
            content.notes.update(run.trial.describe_files())
        return content

    def collect_without_weights(self) -> CheckpointContent:
        """Return the content that Lightning's own files lack: callbacks, random state and position in the data."""
        run = self._run
        rng = capture_rng(run.context.device)
        rest = collect_rest(run.context, run.events.callbacks, dict(rng))
        resume = self._resume_state(rng)
        return CheckpointContent(rest, dataclasses.replace(run.state), self._load_data, resume, has_weights=False)

    def _resume_state(self, rng: dict[str, Any]) -> ResumeState:
        run = self._run
        journal = run.data.journal.state_dict(run.state.batches_trained)
        positions = run.data.journal.positions(run.state.batches_trained)
        kept = run.before_final_validation or StateBeforeValidation(rng, positions, run.has_validated)
        self._follow_settings()
        resume = collect_resume_state(
            run.context, run.state, kept.rng, journal, kept.positions, self._settings, kept.has_validated
        )
        if run.data.global_batch is not None:
            resume.global_batch = vars(run.data.global_batch)
        return resume

    def _follow_settings(self) -> None:
        """Describe the settings anew if the trial has changed them during training."""
        settings = self._run.context.settings
        described = json.dumps([settings.hparams, settings.exp_conf], default=repr, skipkeys=True)
        if described == self._described:
            return
        self._described = described
        losses: list[str] = []
        self._settings = plain = settings.to_plain(losses)
        self._warn_of_losses(losses)
        trial_class = type(self._run.original)
        # Determined wants both hyperparameters and configuration, or neither.
        complete = None not in plain.values()
        hparams, config = (plain["hparams"], plain["experiment_config"]) if complete else (None, None)
        self._load_data = make_load_data(hparams, config, f"{trial_class.__module__}:{trial_class.__qualname__}")
        if isinstance(self._run.trial, ExternalStateTrial):
            self._load_data["trial_type"] = self._run.trial.trial_type

    def _warn_of_losses(self, losses: list[str]) -> None:
        """Name the values that JSON cannot hold, each value once."""
        new = [note for note in losses if note not in self._known_losses]
        self._known_losses.update(new)
        if new and self._run.context.distributed.rank == 0:
            logger.warning(
                "Checkpoints store settings as JSON and omit other values, which cannot be read after loading: %s.",
                "; ".join(new),
            )


class RunCheckpoints:
    """The checkpoints of one run: saved by the policy or by the schedule, complete, the best and the latest.

    All ranks call the same methods, and only the chief writes. The next run begins with :meth:`begin`.

    Attributes:
        best_value: the best value of the policy's metric so far.
        best_id: id of the checkpoint written after the best validation.
        last_id: id of the checkpoint begun last.
        complete: id of the latest complete checkpoint, and the number of batches.
    """

    _trial: TrialCheckpoints  # of the chief

    def __init__(self, storage: CheckpointStorage, policy: CheckpointPolicy, saving: Saving | None = None) -> None:
        self.storage = storage
        self.policy = policy
        self._lock: TrialLock | None = None
        self._saving = saving or Saving()
        self._cleaning: threading.Thread | None = None
        self._forget(None)
        self.queue = CheckpointQueue(storage.root, self._saving.code, self._saving.in_background)

    def begin(self, resumed: CheckpointContent | None, leads: bool) -> None:
        """Forget an earlier run. If this rank ``leads``, lock the trial, and remove what killed runs left in a thread.

        Raise a ``StorageError`` if the storage cannot be written to, or a live run has the given name.
        """
        state = None if resumed is None else resumed.resume
        self.queue.forget()
        self._forget(None if state is None else state.best_value)
        if leads:
            self._lead(resumed)

    def _forget(self, best_value: float | None) -> None:
        self.best_value = best_value
        self.best_id: str | None = None
        self.last_id: str | None = None
        self.complete: tuple[str, int] | None = None
        self._notes: dict[str, Any] = {}  # for the metadata of checkpoints
        self._unreadable: UnsafeValues | None = None  # until the first checkpoint
        self._metrics: dict[int, float] = {}  # of the latest validation, by the number of batches
        self._unreported = 0
        self._batches_of: dict[str, int] = {}

    def _lead(self, resumed: CheckpointContent | None) -> None:
        storage = self.storage
        saving = self._saving
        storage.require_writable()
        inherited = None if resumed is None or resumed.resume is None else resumed.resume.trial
        trial, self._lock = lock_trial(storage.root, saving.experiment, saving.trial, inherited)
        experiment = saving.experiment or trial
        job = {} if saving.job is None else {"job": saving.job}
        self._notes = {"trial": trial, "experiment": experiment, **job}
        self._trial = TrialCheckpoints(storage, self.policy, experiment, trial, resumed, saving.on_delete)
        if self.policy.retention is not None:
            self._trial.learn()
        cleaning = threading.Thread(target=clean, args=[storage], name="det_lightning-cleaning", daemon=True)
        cleaning.start()
        self._cleaning = cleaning  # started, even if a signal comes in between

    def attach(self, run: TrialRun) -> None:
        """Attach the run whose state :meth:`save` writes."""
        self._run = run
        self._content = RunContent(run)
        self._distributed = run.context.distributed

    def save(self) -> None:
        """Write a checkpoint; in the background, wait for the previous one and start writing."""
        if self._unreported:
            self._report_complete(wait=True)
        run = self._run
        if self._distributed.size > 1:
            # The other ranks wait for the chief anyway, and a request to end may come meanwhile.
            run.early_end.forget()
        batches_trained = run.state.batches_trained
        run.state.last_ckpt = batches_trained
        checkpoint_id = self._distributed.broadcast(new_id())
        # Noted before writing: the checkpoint may be complete despite an error, such as a dead loader worker.
        self._batches_of[checkpoint_id] = batches_trained
        content = self._content.collect()
        if content is not None:
            write = functools.partial(self._write, content, checkpoint_id)
            if content.is_sharded:
                shared = SharedCheckpoint(self._distributed, self.storage, checkpoint_id, content)
                shared.write(write, run.events.report_written)
            else:
                write(run.events.report_written)
            if self._distributed.rank == 0:
                logger.info("Checkpoint %s after %d batches.", checkpoint_id, batches_trained)
        self._unreported += 1
        self.last_id = checkpoint_id
        self._report_complete()

    def save_unless_current(self) -> None:
        """Write a checkpoint if any batch was trained since the latest checkpoint."""
        if self._run.state.last_ckpt != self._run.state.batches_trained:
            self.save()

    def save_after_validation(self, metrics: dict[str, Any]) -> None:
        """Write a checkpoint if the policy asks for a checkpoint after a validation with these metrics.

        If the policy's metric is missing, save the training so far and raise a ``ValueError``.
        """
        policy = self.policy
        value = as_float(metrics.get(policy.metric or ""))
        if value is None and policy.validations == "best":
            self._refuse(metrics)
        if value is not None:
            self._metrics = {self._run.state.batches_trained: value}
        elsewhere = self._saving.best_elsewhere
        if policy.validations == "best" and elsewhere is not None:
            self._improve(self._distributed.broadcast(elsewhere() if self._distributed.rank == 0 else None))
        improved = policy.validations == "best" and self._improve(value)
        is_current = self._run.state.last_ckpt == self._run.state.batches_trained
        if (improved or policy.validations == "all") and not is_current:
            self.save()
        elif value is not None and is_current:
            _run_on_chief(self._distributed, self._note_metric, value)
        if improved:
            self.best_id = self.last_id

    def _note_metric(self, value: float) -> None:
        self.queue.wait()
        with defer_signal(WORKER_DIED):
            self._trial.note_metric(self._run.state.batches_trained, value)

    def _refuse(self, metrics: dict[str, Any]) -> None:
        self._run.state.last_val = 0  # not validated: a resumed run validates again
        self.save_unless_current()
        saved = "" if self.last_id is None else f" The training so far is saved in checkpoint {self.last_id}."
        raise ValueError(f"{self.policy.describe_missing(metrics)}{saved}")

    def _improve(self, value: float | None) -> bool:
        """Return whether a value is the best so far, and remember the best."""
        is_better = value is not None and self.policy.improves(value, self.best_value)
        if is_better:
            self.best_value = value
        return is_better

    def report_complete(self) -> None:
        """Notify the trial of newly completed checkpoints; raise on every rank if a checkpoint has failed.

        Other ranks wait for the chief only if the chief has already announced news.
        """
        if self._distributed.size == 1 or self._run.exchange.checkpoint_completed:
            self._report_complete()

    def has_news(self) -> bool:
        """Return whether the chief has a completed or failed checkpoint."""
        return self._distributed.rank == 0 and bool(self._unreported) and not self.queue.is_under_way()

    def _report_complete(self, wait: bool = False) -> None:
        if not self._unreported:
            return
        complete: list[str] = _run_on_chief(self._distributed, self.queue.take_complete, wait)
        self._unreported -= len(complete)
        if complete and self._distributed.size > 1:
            self._run.early_end.forget()  # on_checkpoint_upload_end may ask to stop
        self._report(complete)

    def _report(self, complete: list[str]) -> None:
        for checkpoint_id in complete:
            batches_trained = self._batches_of.pop(checkpoint_id)
            self.complete = (checkpoint_id, batches_trained)
            if self._saving.on_complete is not None and self._distributed.rank == 0:
                self._saving.on_complete(checkpoint_id, batches_trained)
            self._run.events.emit("on_checkpoint_upload_end", uuid=checkpoint_id)

    def finish(self) -> None:
        """Wait until everything is written; raise a StorageError if a checkpoint of this run has vanished."""
        self._report_complete(wait=True)
        _run_on_chief(self._distributed, lambda: self._trial.finish())

    def abandon(self, exception: BaseException) -> None:
        """Finish checkpoints under way on this rank after the run has failed; other ranks may be gone."""
        self._unreported = 0
        if self.queue.is_under_way():
            logger.warning(
                "A checkpoint is being written, and the process waits for the end. Ctrl-C discards the checkpoint."
            )
        try:
            self._report(self.queue.take_complete(wait=True))
        except errors.CheckpointError as e:
            if e is not exception:  # this failure must not hide the error at the end of the run
                logger.error("The run failed while a checkpoint was being written, and this checkpoint is lost: %s", e)

    def close(self) -> None:
        """Release the trial."""
        if self._cleaning is not None:
            self._cleaning.join(_LAST_WAIT_S)
            self._cleaning = None
        if self._lock is not None:
            self._lock.release()

    def _write(
        self, content: CheckpointContent, checkpoint_id: str, report_written: ReportWritten | None = None
    ) -> None:
        """Write a checkpoint; in the background, wait for the previous one and start writing."""
        batches_trained = content.trial_state.batches_trained
        metric = self._metrics.get(batches_trained)
        described = self._trial.describe_next(metric)
        content.notes.update(self._notes, **described)
        if content.resume is not None:
            content.resume.best_value = self.best_value
            content.resume.trial = self._notes.get("trial")
        saving = self._saving
        if saving.on_begin is not None or self._unreadable is None:
            self._unreadable = self._unreadable or UnsafeValues()
            self._unreadable.warn_of(list_parts(content))

        def announce(directory: pathlib.Path) -> None:
            assert saving.on_begin is not None
            has_objects = self._unreadable is not None and self._unreadable.are_possible
            files = [directory / name for name in _FILES_WITH_OBJECTS if has_objects]
            digests = [digest_file(file) for file in files if file.is_file()]
            saving.on_begin(checkpoint_id, batches_trained, self.storage, digests)

        def note() -> None:
            if saving.on_written is not None:
                saving.on_written(checkpoint_id, batches_trained)
            self._trial.add(checkpoint_id, batches_trained, described["time"], metric)

        before = None if saving.on_begin is None else announce
        self.queue.write(content, checkpoint_id, report_written, before, note)


def clean(storage: CheckpointStorage) -> None:
    """Remove what killed runs left in a storage; if this is interrupted, the next run continues."""
    try:
        if not (storage.is_local or storage.root.is_object_store):
            # A connection such as SFTP's serves one thread at a time.
            options = {**storage.options, "skip_instance_cache": True}
            storage = CheckpointStorage(storage.root.url, options=options)
        storage.remove_leftovers()
        remove_dead_locks(storage.root)
    except errors.StorageError as e:
        logger.warning("What killed runs left in %s cannot be removed: %s", storage, e)


def _run_on_chief(distributed: DistributedContext, action: Callable[..., Any], *args: Any) -> Any:
    """Return the result of ``action`` on the chief on every rank; raise a CheckpointError on every rank."""
    if distributed.size == 1:
        return action(*args)
    outcome = None
    if distributed.rank == 0:
        try:
            outcome = action(*args)
        except errors.CheckpointError as e:
            outcome = e
    outcome = distributed.broadcast(outcome)
    if isinstance(outcome, errors.CheckpointError):
        raise outcome
    return outcome
