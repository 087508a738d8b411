"""Reducing and reporting the metrics of each workload."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from det_lightning.checkpoint.format.content import TrialState
from det_lightning.engine.boundary_exchange import BoundaryExchange
from det_lightning.engine.events import TrialEvents
from det_lightning.engine.metrics import MetricTransfer, MetricWindow, average_metrics
from det_lightning.engine.reporter import Reporter
from det_lightning.engine.run_log import LoggedWorkload, RunLog
from det_lightning.engine.run_warnings import RunWarnings


class WorkloadReports:
    """Reports each workload to the log, to ``reporters`` and to the trial's callbacks.

    Metrics on a GPU are available only after its work is done. Where nothing can tell the difference, the host waits
    for them only once the next batch has been given to the GPU; until then the report is ``unfinished``.
    """

    def __init__(
        self,
        exchange: BoundaryExchange,
        events: TrialEvents,
        log: RunLog,
        warnings: RunWarnings,
        reporters: list[Reporter],
    ) -> None:
        #: Whether other hooks run after a report, before whatever else is due at the boundary.
        self.hooks_follow = False
        self._exchange = exchange
        self._events = events
        self._log = log
        self._warnings = warnings
        self._reporters = reporters
        #: What :meth:`finish` will do, if a report is waiting for it.
        self.unfinished: Callable[[], None] | None = None

    def report(self, window: MetricWindow, state: TrialState, next_batch_follows: bool) -> None:
        """Report the workload that ended at ``state`` and whose metrics are in ``window``.

        All ranks call this. ``next_batch_follows`` says that nothing else is due before the next batch.
        """
        users_code_follows = self.hooks_follow or bool(self._events.overriding("on_training_workload_end"))
        metrics = window.begin_transfer()
        workload = self._log.workload
        self.unfinished = functools.partial(
            self._report, metrics, dataclasses.replace(state), workload, users_code_follows
        )
        may_finish_later = next_batch_follows and not users_code_follows and metrics.runs_aside
        if not (may_finish_later and self._exchange.may_average_later):
            self.finish()

    def finish(self) -> None:
        """Finish the report that is waiting, if there is one."""
        if self.unfinished is not None:
            finish = self.unfinished
            self.unfinished = None
            finish()

    def _report(
        self, metrics: MetricTransfer, state: TrialState, workload: LoggedWorkload, users_code_follows: bool
    ) -> None:
        batch_metrics = self._exchange.average(metrics.finish(), users_code_follows)
        avg_metrics: dict[str, Any] = average_metrics(batch_metrics)
        avg_metrics.update(self._exchange.reduce_registered(for_training=True))
        batches_trained = state.batches_trained
        self._log.report_training(batches_trained, avg_metrics, workload, len(batch_metrics))
        self._warnings.look_at_training(batches_trained, avg_metrics, batch_metrics)
        for reporter in self._reporters:
            reporter.report_training(batches_trained, avg_metrics, batch_metrics)
        add_position(avg_metrics, state)
        self._events.emit("on_training_workload_end", avg_metrics=avg_metrics, batch_metrics=batch_metrics)


def add_position(metrics: dict[str, Any], state: TrialState) -> None:
    """Add the numbers of trained batches and epochs to the metrics, unless a metric has that name."""
    metrics.setdefault("batches", state.batches_trained)
    metrics.setdefault("epochs", state.epochs_trained)
