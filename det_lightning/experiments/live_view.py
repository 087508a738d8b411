"""The terminal during an experiment: a live table, or plain lines if the output is piped."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from det_lightning.escaping import escape
from det_lightning.experiments.state import ExperimentState, TrialRecord, TrialStatus
from det_lightning.experiments.trial_table import format_number

if TYPE_CHECKING:
    from rich.live import Live

Update = Callable[[ExperimentState], None]
# The most trials on a terminal; ended trials are left out first, in the order of creation.
_MOST_ROWS = 20
_REDRAW_S = 0.5


@contextlib.contextmanager
def live_view() -> Iterator[Update]:
    """Show the trials of an experiment on the standard error; yield a function to call after possible changes."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False) as live:
        table = _Table(live)
        try:
            yield table
        finally:
            table.draw()


class _View:
    """Collects the notices to show once: warnings, and that all trials were asked to save and end."""

    _messages = 0
    _pausing = False

    def new_notices(self, state: ExperimentState) -> list[str]:
        found = [f"warning: {message}" for message in state.messages[self._messages :]]
        if state.pausing and not self._pausing:
            found.append("Pausing: the trials save and end. Another interrupt ends them at once.")
        self._messages = len(state.messages)
        self._pausing = state.pausing
        return [escape(notice) for notice in found]


class _Lines(_View):
    """Writes a line for each change of a trial's state and for each validation."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, int]] = {}

    def __call__(self, state: ExperimentState) -> None:
        lines = self.new_notices(state)
        for trial in state.trials.values():
            now = (trial.status.value, len(trial.validations))
            if self._seen.get(trial.trial_id) != now:
                self._seen[trial.trial_id] = now
                lines.append(escape(_describe_trial(state, trial)))
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def _describe_trial(state: ExperimentState, trial: TrialRecord) -> str:
    parts = [f"trial {trial.trial_id}: {trial.status.value}", f"{trial.steps_completed} batches"]
    if trial.validations:
        found = (state.find_metric(trial.latest_metrics()), state.find_best(trial))
        value, best = (format_number(one) or "missing" for one in found)
        parts += [f"{state.metric} {value}", f"best {best}"]
    if trial.reason:
        parts.append(trial.reason)
    return ", ".join(parts)


class _Table(_View):
    """A table, redrawn after changes but at most twice a second; notices stay above the table."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._state: ExperimentState | None = None
        self._drawn_at = 0.0

    def __call__(self, state: ExperimentState) -> None:
        self._state = state
        for notice in self.new_notices(state):
            self._live.console.print(notice, markup=False)
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self.draw()

    def draw(self) -> None:
        """Draw the table now."""
        from rich.table import Table

        self._drawn_at = time.monotonic()
        state = self._state
        if state is None:
            return
        table = Table(box=None, pad_edge=False)
        for heading in ("TRIAL", "STATE", "BATCHES", f"BEST {state.metric}", "LATEST", "RESTARTS", "ETA"):
            table.add_column(escape(heading), justify="left" if heading == "STATE" else "right")
        trials = sorted(state.trials.values(), key=lambda trial: (not trial.status.is_final, trial.trial_id))
        for trial in trials[-_MOST_ROWS:]:
            table.add_row(
                str(trial.trial_id),
                trial.status.value,
                str(trial.steps_completed),
                format_number(state.find_best(trial)),
                format_number(state.find_metric(trial.latest_metrics())),
                str(trial.restarts or ""),
                _describe_time_left(trial),
            )
        self._live.update(table, refresh=True)


def _describe_time_left(trial: TrialRecord) -> str:
    """Return the time left for a trial, if known; a search may stop the trial earlier."""
    left_s = trial.progress.time_left_s(time.time()) if trial.status is TrialStatus.RUNNING else None
    if left_s is None:
        return ""
    minutes, seconds = divmod(round(left_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
