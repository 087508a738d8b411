"""The metrics at a boundary: ranks exchange metrics, with flags about the end of the run, and report them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

from det_lightning.checkpoint.format.content import TrialState
from det_lightning.distributed.rank_exchange import RankExchange
from det_lightning.engine.events import TrialEvents
from det_lightning.engine.metrics import (
    MetricTransfer,
    MetricWindow,
    average_metrics,
    average_over_ranks,
    reduce_validation_metrics,
    to_numpy,
)
from det_lightning.engine.run_log import LoggedWorkload, RunLog
from det_lightning.engine.run_options import RunOptions
from det_lightning.engine.stopping import EarlyEnd, RankFlag
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._reducer import Reducer


class BoundaryExchange:
    """Reduces the metrics of a run over the ranks. All ranks call the same methods.

    ``users_code_follows`` says whether user code runs between the call and :meth:`EarlyEnd.agree`.
    """

    def __init__(self, context: PyTorchTrialContext, options: RunOptions) -> None:
        self._reducers = context.reducers
        self._ranks = RankExchange(context.distributed)
        self.early_end = EarlyEnd(context, options.stop_request, self._ranks)
        self._has_checkpoint_news = options.has_checkpoint_news
        #: Whether the chief had news of checkpoints when the ranks last exchanged metrics.
        self.checkpoint_completed = False

    @property
    def may_average_later(self) -> bool:
        """Whether averaging a workload's metrics involves neither another rank nor a reducer of the trial."""
        return self.early_end.is_alone and not self._reducers.reduces_training

    def average(self, transfer: MetricTransfer, users_code_follows: bool) -> list[dict[str, Any]]:
        """Return the metrics of each batch of a workload, averaged over the ranks."""
        with self._ranks.distributed.in_batches():  # a GPU may wait for other ranks
            batches = transfer.finish()
        metrics, of_all_ranks = average_over_ranks(batches, self._ranks, self._flags(users_code_follows))
        self._note(of_all_ranks)
        return metrics

    def reduce_validation(
        self, batches: list[dict[str, Any]], reducer: Reducer | dict[str, Reducer], users_code_follows: bool
    ) -> dict[str, Any]:
        """Return the metrics of a validation, reduced over batches and ranks."""
        flags = self._flags(users_code_follows)
        metrics, of_all_ranks = reduce_validation_metrics(batches, reducer, self._ranks, flags)
        self._note(of_all_ranks)
        return metrics

    def broadcast_validation(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of the chief after a validation on the chief alone."""
        of_chief: dict[str, Any] = self._ranks.broadcast(metrics)
        self.early_end.forget()
        return of_chief

    def reduce_registered(self, for_training: bool) -> dict[str, Any]:
        """Return the metrics of the trial's own reducers, as numpy values."""
        return to_numpy(self._reducers.reduce_metrics(for_training, self._ranks.allgather))

    def _flags(self, users_code_follows: bool) -> RankFlag:
        wishes = self.early_end.wishes(users_code_follows)
        return wishes | RankFlag.CHECKPOINT_COMPLETED if self._has_checkpoint_news() else wishes

    def _note(self, of_all_ranks: int) -> None:
        flags = RankFlag(of_all_ranks)
        self.checkpoint_completed = RankFlag.CHECKPOINT_COMPLETED in flags
        self.early_end.note(flags)


class Reporter(Protocol):
    """Takes the metrics of a run, on the chief."""

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Take the metrics of a workload after ``steps_completed`` batches."""

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Take the metrics of a validation after ``steps_completed`` batches."""


class WorkloadReports:
    """Reports each workload to the log, to ``reporters`` and to the trial's callbacks.

    Metrics on a GPU are available only after the GPU's work is done. Where nothing can tell the difference, the host
    gives the next batch to the GPU first; until then the report is ``unfinished``.
    """

    def __init__(
        self,
        exchange: BoundaryExchange,
        events: TrialEvents,
        log: RunLog,
        reporters: list[Reporter],
        hooks_follow: bool = False,
    ) -> None:
        self._hooks_follow = hooks_follow
        self._exchange = exchange
        self._events = events
        self._log = log
        self._reporters = reporters
        #: The waiting report, for :meth:`finish`.
        self.unfinished: Callable[[], None] | None = None

    def report(self, window: MetricWindow, state: TrialState, next_batch_follows: bool) -> None:
        """Report the workload that ended at ``state``, with the metrics in ``window``.

        All ranks call this. ``next_batch_follows`` says whether nothing else is due before the next batch.
        """
        users_code_follows = self._hooks_follow or bool(self._events.find_overrides("on_training_workload_end"))
        metrics = window.begin_transfer()
        workload = self._log.workload
        self.unfinished = functools.partial(
            self._report, metrics, dataclasses.replace(state), workload, users_code_follows
        )
        may_finish_later = next_batch_follows and not users_code_follows and metrics.runs_aside
        if not (may_finish_later and self._exchange.may_average_later):
            self.finish()

    def finish(self) -> None:
        """Finish a waiting report, if any."""
        if self.unfinished is not None:
            finish = self.unfinished
            self.unfinished = None
            finish()

    def _report(
        self, metrics: MetricTransfer, state: TrialState, workload: LoggedWorkload, users_code_follows: bool
    ) -> None:
        batch_metrics = self._exchange.average(metrics, users_code_follows)
        avg_metrics: dict[str, Any] = average_metrics(batch_metrics)
        avg_metrics.update(self._exchange.reduce_registered(for_training=True))
        batches_trained = state.batches_trained
        self._log.report_training(batches_trained, avg_metrics, workload, len(batch_metrics))
        for reporter in self._reporters:
            reporter.report_training(batches_trained, avg_metrics, batch_metrics)
        add_position(avg_metrics, state)
        self._events.emit("on_training_workload_end", avg_metrics=avg_metrics, batch_metrics=batch_metrics)


def add_position(metrics: dict[str, Any], state: TrialState) -> None:
    """Add the numbers of trained batches and epochs to the metrics, unless a metric has the name."""
    metrics.setdefault("batches", state.batches_trained)
    metrics.setdefault("epochs", state.epochs_trained)
