"""Runs the trials of an experiment: the search decides, the launcher starts processes, the log records."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from det_lightning import errors
from det_lightning.errors import PREEMPTED_EXIT_CODE
from det_lightning.experiments.event_log import EventLog
from det_lightning.experiments.launcher import Launcher, StartedRun
from det_lightning.experiments.search.operations import CreateTrial, ExitReason, Operation, Shutdown, StopTrial, Warn
from det_lightning.experiments.search.search import Search
from det_lightning.experiments.state import Checkpoint, ExperimentState, TrialRecord, TrialStatus
from det_lightning.experiments.trial_process import RecordReader
from det_lightning.experiments.trial_reports import read_reports
from det_lightning.files.strict_json import as_number

_POLL_S = 0.1
# As in Determined, a trial with invalid hyperparameters has this long to end by itself.
_GIVING_UP_S = 10.0
# A script may continue after a smoke run has validated; it has this long to save and to end by itself.
_END_OF_TRY_S = 10.0
_NOT_FOUND = 127
# The exit statuses of a run ended by a signal, of which its log says nothing.
_KILLED = (137, 143)
# The exit statuses of a preempted run: 0 comes from a script that has reported the preemption.
_PREEMPTED = (0, PREEMPTED_EXIT_CODE)


@dataclasses.dataclass
class _Running:
    run: StartedRun
    records: RecordReader
    stop_at_s: float = math.inf
    kill_at_s: float = math.inf


class ExperimentRunner:
    """Runs the trials of a search, until the search is finished or a signal pauses the experiment.

    An event is logged before it has consequences, and state and search follow from the log. So another
    runner with the same arguments can take over after a kill at any moment. ``search`` must not have answered an event
    yet. The runner calls ``on_change`` again and again, after possible changes of the state. ``max_restarts`` None is a
    smoke run: a trial ends after its first validation, and is not restarted.
    """

    def __init__(
        self,
        log: EventLog,
        search: Search,
        state: ExperimentState,
        launcher: Launcher,
        max_restarts: int | None,
        on_change: Callable[[ExperimentState], None],
    ) -> None:
        self.state = state
        self._log = log
        self._search = search
        self._launcher = launcher
        self._is_try = max_restarts is None
        self._max_restarts = max_restarts or 0
        self._on_change = on_change
        self._running: dict[int, _Running] = {}

    def run(self, *, retry_failed: bool = False) -> ExitReason | None:
        """Run until the search is finished; return the outcome, or None if the experiment was paused.

        With ``retry_failed``, failed trials continue with a new count of restarts.
        """
        self._replay(retry_failed)
        while self.state.outcome is None:
            if self.state.pausing and not self._running:
                self.record("experiment_paused")
                return None
            self._start_queued()
            for trial_id in list(self._running):
                self._look_at(trial_id)
            self._on_change(self.state)
            if self._running or not self._launcher.has_room():
                time.sleep(_POLL_S)
        return ExitReason(self.state.outcome)

    def pause(self) -> None:
        """Ask all trials to save and end; :meth:`run` then returns. May be called by a signal handler."""
        self.state.pausing = True
        for running in list(self._running.values()):
            running.run.stop()

    def kill(self) -> None:
        """End all trials at once; :meth:`run` then returns. May be called by a signal handler."""
        self.state.pausing = True
        for running in list(self._running.values()):
            running.run.kill()

    # What the search asks for

    def _replay(self, retry_failed: bool) -> None:
        """Replay the events of the log to the search, and carry out the operations that the log lacks."""
        operations = self._search.initial()
        events = list(self._log.events)
        self.record("experiment_resumed" if events else "experiment_started")
        for event in events:
            if event["type"] == "validation":
                operations += self._answer_to_validation(event)
            elif event.get("closed"):
                operations += self._answer_to_close(event)
            elif event["type"] == "trial_retried":
                operations = self._retry(event["trial"], operations)
        failed = [trial for trial in self.state.trials.values() if trial.status is TrialStatus.ERROR]
        for trial in failed if retry_failed else []:
            self.record("trial_retried", trial=trial.trial_id)
            operations = self._retry(trial.trial_id, operations)
        for trial in self.state.trials.values():
            if trial.is_open:
                trial.orphaned = True
                self._add(trial, self._launcher.adopt(trial))
        self._launcher.publish_best(self.state)
        self._carry_out(operation for operation in operations if not self._is_done(operation))

    def _retry(self, trial_id: int, operations: list[Operation]) -> list[Operation]:
        """Tell the search about a retried trial; return the operations without the consequences of the failure."""
        self._search.trial_retried(trial_id)
        stop = (operation for operation in operations if isinstance(operation, StopTrial) and operation.error)
        ended = [operation for operation in stop if operation.trial_id == trial_id]
        return [one for one in operations if not isinstance(one, Shutdown) and one not in ended]

    def _is_done(self, operation: Operation) -> bool:
        if isinstance(operation, CreateTrial):
            return operation.trial_id in self.state.trials
        if isinstance(operation, StopTrial):
            trial = self.state.trials.get(operation.trial_id)
            return trial is not None and trial.stop_requested
        return isinstance(operation, Warn)

    def _answer_to_validation(self, event: Mapping[str, Any]) -> list[Operation]:
        metrics = event["metrics"]
        clock = self._search.searcher.clock
        at = as_number(metrics.get(clock))
        batch_size = self.state.trials[event["trial"]].hparams.get("global_batch_size")
        if at is None and clock == "records" and isinstance(batch_size, int):
            # A length in records is rounded down to batches.
            at = (event["steps_completed"] + 1) * batch_size - 1
        return self._search.validation_completed(event["trial"], as_number(metrics.get(self.state.metric)), at)

    def _answer_to_close(self, event: Mapping[str, Any]) -> list[Operation]:
        # Earlier releases did not note invalid_hp here, and no trial went on after the end.
        invalid = event.get("invalid_hp", self.state.trials[event["trial"]].invalid_hp)
        reason = ExitReason.INVALID_HP if invalid else ExitReason(event["closed"])
        return self._search.trial_exited(event["trial"], reason)

    def _carry_out(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, CreateTrial):
                self.record(
                    "trial_created",
                    trial=operation.trial_id,
                    seed=operation.trial_seed,
                    hparams=operation.hparams,
                    validate_at=list(operation.validate_at),
                )
            elif isinstance(operation, StopTrial):
                self.record("stop_requested", trial=operation.trial_id, error=operation.error)
                if operation.trial_id in self._running:
                    self._running[operation.trial_id].run.stop()
            elif isinstance(operation, Warn):
                self.record("message", text=f"Trial {operation.trial_id}: {operation.message}")
            elif isinstance(operation, Shutdown):
                self.record("experiment_ended", outcome=operation.outcome.value)

    # Trials

    def _start_queued(self) -> None:
        for trial in list(self.state.trials.values()):
            if trial.status is not TrialStatus.QUEUED:
                continue
            if self.state.pausing or not self._launcher.has_room():
                return
            start = self._choose_start(trial)
            checkpoint_id = None if start is None else start.checkpoint_id
            self.record("run_started", trial=trial.trial_id, run=trial.runs + 1, checkpoint=checkpoint_id)
            run = self._launcher.start(trial, self.state, self.record)
            self._add(trial, run)
            # A signal arrived before the run was in the list, or a trial is retried after a failure while stopping.
            if self.state.pausing or trial.stop_requested:
                run.stop()

    def _choose_start(self, trial: TrialRecord) -> Checkpoint | None:
        """Return the trial's newest checkpoint in the storage, reported or not; None to start from scratch."""
        self.report_complete(trial)
        start = self._launcher.checkpoints.find_newest(trial)
        if start is None and (reported := trial.newest_checkpoint()) is not None:
            text = (
                f"Trial {trial.trial_id} begins again: its {len(trial.checkpoints)} reported checkpoints no longer "
                f"exist, the newest after {reported.steps_completed} batches, {reported.checkpoint_id}."
            )
            self.record("message", text=text)
        return start

    def report_complete(self, trial: TrialRecord) -> None:
        """Report complete checkpoints that a killed trial could not report itself.

        Raise a ``StorageError`` if the storage cannot be read.
        """
        existing = self._launcher.checkpoints.find_existing(trial.begun.values())
        for begun in [begun for begun in trial.begun.values() if begun.checkpoint_id in existing]:
            known = {"steps_completed": begun.steps_completed, "checkpoint_id": begun.checkpoint_id}
            self.record("checkpoint", trial=trial.trial_id, time=begun.time, sha256=list(begun.sha256), **known)

    def _add(self, trial: TrialRecord, run: StartedRun) -> None:
        self._running[trial.trial_id] = _Running(run, self._launcher.open_records(trial))

    def _look_at(self, trial_id: int) -> None:
        running = self._running[trial_id]
        run = running.run
        # The order matters: the last reports can only be read after the end of the run.
        ended = run.has_ended()
        for record, event in read_reports(running.records, self.state.trials[trial_id]):
            self._take(trial_id, record, event)
        if not ended and time.monotonic() > running.stop_at_s:
            running.stop_at_s = math.inf
            self._carry_out([StopTrial(trial_id)])
        if not ended and time.monotonic() > running.kill_at_s:
            run.kill()
        if ended:
            del self._running[trial_id]
            self._launcher.release(trial_id)
            self._take_exit(self.state.trials[trial_id], run.exit_status(), run.problem())

    def _take(self, trial_id: int, record: dict[str, Any], reported: dict[str, Any] | None) -> None:
        """Act on a report of a trial, and on its event, if any."""
        trial = self.state.trials[trial_id]
        if record["group"] == "progress":
            fraction = as_number(record["metrics"].get("progress"))
            if fraction is not None and 0 <= fraction <= 1:
                trial.progress.report(fraction, record["time"])
        if reported is None:
            return
        event = self._append({**reported, "time": time.time()})
        if event["type"] in ("validation", "validation_extended"):
            self._launcher.publish_best(self.state)
        if event["type"] == "validation":
            self._carry_out(self._answer_to_validation(event))
            if self._is_try:
                running = self._running[trial_id]
                running.stop_at_s = min(running.stop_at_s, time.monotonic() + _END_OF_TRY_S)
        elif event["type"] == "early_exit" and trial.invalid_hp:
            running = self._running[trial_id]
            running.kill_at_s = min(running.kill_at_s, time.monotonic() + _GIVING_UP_S)

    def _take_exit(self, trial: TrialRecord, status: int | None, problem: str | None) -> None:
        """Decide what the end of a run means for the trial."""
        with contextlib.suppress(errors.StorageError):  # asked again before the next run, and in the end
            self.report_complete(trial)
        # Otherwise, a command that always claims preemption would be started again for ever.
        is_preempted = self._is_try or trial.stop_requested or trial.orphaned or trial.has_saved_progress()
        is_done = status == 0 and not trial.preempted and problem is None
        ended_well = is_done or self.state.pausing or (status in _PREEMPTED and is_preempted)
        closed, reason = self._choose_status(trial, status, problem, ended_well)
        if not ended_well and problem is None and status not in (None, *_KILLED):
            reason = ": ".join(filter(None, [reason, self._launcher.find_error(trial.trial_id)]))
        event = self.record(
            "run_ended",
            trial=trial.trial_id,
            status=status,
            failed=not ended_well,
            paused=self.state.pausing and closed is None,
            closed=None if closed is None else closed.value,
            reason=reason,
            steps_completed=trial.steps_completed,
            invalid_hp=trial.invalid_hp,
        )
        if closed is not None:
            self._carry_out(self._answer_to_close(event))

    def _choose_status(
        self, trial: TrialRecord, status: int | None, problem: str | None, ended_well: bool
    ) -> tuple[TrialStatus | None, str | None]:
        """Return the trial's final status, or None for another start, and the reason, if any."""
        # A report of one rank is enough: other ranks may fail as a consequence.
        if trial.invalid_hp and trial.stop_error is None:
            return TrialStatus.COMPLETED, "invalid hyperparameters"
        if ended_well:
            if trial.stop_error is not None:
                return TrialStatus.ERROR, trial.stop_error
            # A script that ends on request exits with 0, too, but is not done.
            is_done = status == 0 and not trial.preempted and problem is None
            is_over = is_done or trial.stop_requested or (self._is_try and not self.state.pausing)
            return (TrialStatus.COMPLETED if is_over else None), None
        what = problem or ("its processes were killed" if status is None else f"it ended with status {status}")
        if problem is None and status == _NOT_FOUND:
            what += ", that of a shell without the command"
        if problem is None and status in _PREEMPTED:
            what += ", like a preempted run, but had saved nothing"
        if trial.stop_requested:
            return TrialStatus.ERROR, f"{what} when it was asked to stop"
        if policy := self._launcher.find_retry_policy(trial.trial_id):
            return TrialStatus.ERROR, f"{what}, and the log policy {policy} cancels retries"
        if trial.restarts >= self._max_restarts:
            return TrialStatus.ERROR, f"{what}, after {self._max_restarts} restarts"
        return None, what

    def record(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append an event to the log and apply the event to the state."""
        return self._append({"type": kind, "time": time.time(), **values})

    def _append(self, event: dict[str, Any]) -> dict[str, Any]:
        self._log.append(event)
        self.state.apply(event)
        return event
