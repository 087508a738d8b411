"""Decides with all ranks whether a run ends early; gives the metrics of a boundary to reports; logs the progress.

Change here: a reason to end early, or another request of one rank to all, is a flag of ``EarlyEnd.stop_flags``.
``det_lightning/engine/schedule.py`` yields the actions that follow; ``adapters/driver.py`` handles the exceptions of
trials.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Protocol

from det_lightning.checkpoint.format.content import CheckpointContent, TrialState
from det_lightning.core._reports import select_scalars
from det_lightning.engine.metrics import (
    MetricWindow,
    RankExchange,
    average_over_ranks,
    reduce_validation_metrics,
    to_numpy,
)
from det_lightning.escaping import get_logger
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial
from det_lightning.pytorch._reducer import Reducer
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.signals import SAME_SIGNAL_S, end_by_signal, print_at_once

logger = get_logger(__name__)

# Ranks that come to the same end do so at about the same time.
_MEETING_TIME_S = 10.0


class RankFlag(enum.IntFlag):
    """Flags that a rank sends at a boundary, along with the metrics or alone.

    Attributes:
        STOP: the trial wants to stop.
        PREEMPT: the process was asked to end.
        ASK_AGAIN: user code runs before the ranks look at the answers, and may want to stop.
        CHECKPOINT_COMPLETED: the chief has checkpoints to report.
    """

    STOP = enum.auto()
    PREEMPT = enum.auto()
    ASK_AGAIN = enum.auto()
    CHECKPOINT_COMPLETED = enum.auto()


@dataclasses.dataclass
class StopRequest:
    """Whether this process was asked to save the run and end, and with which exit code."""

    exit_code: int
    requested: bool = False


class EarlyEnd:
    """Agrees with the other ranks on the end of the run; ``preempted`` if a process was asked to end.

    The flags of the ranks travel with the metrics of a workload or a validation. Ranks exchange flags again before
    going on only if user code has since run on any rank, or a checkpoint was written.
    """

    def __init__(self, context: PyTorchTrialContext, stop_request: StopRequest | None, exchange: RankExchange) -> None:
        self.stop_request = stop_request or StopRequest(exit_code=0)
        self.is_alone = exchange.is_alone
        self.preempted = False
        self._context = context
        self._exchange = exchange
        self._agreed: RankFlag | None = None

    def stop_flags(self, users_code_follows: bool) -> RankFlag:
        """Return flags for the other ranks; ``users_code_follows`` says that user code runs before :meth:`agree`."""
        stop = RankFlag.STOP if self._context.get_stop_requested() else RankFlag(0)
        preempt = RankFlag.PREEMPT if self.stop_request.requested else RankFlag(0)
        return stop | preempt | (RankFlag.ASK_AGAIN if users_code_follows else RankFlag(0))

    def note(self, flags: RankFlag) -> None:
        """Remember the flags of all ranks for :meth:`agree`."""
        self._agreed = None if self.is_alone or RankFlag.ASK_AGAIN in flags else flags

    def forget(self) -> None:
        """Ask again at the next :meth:`agree`, on all ranks."""
        self._agreed = None

    def agree(self) -> bool:
        """Return whether any rank wants to stop, or was asked to end; all ranks must call this."""
        agreed = self._agreed
        if agreed is None:
            flags = self.stop_flags(users_code_follows=False)
            agreed = RankFlag(self._exchange.unite(flags))
            self.note(agreed)
        stops = RankFlag.STOP in agreed
        # A trial that wants to stop is done: a scheduler must not start the trial again.
        self.preempted = RankFlag.PREEMPT in agreed and not stops
        return stops or self.preempted

    def is_immediate(self, at_boundary: bool) -> bool:
        """Return whether the run ends before a boundary, because the only process was asked to end."""
        if self.is_alone and not at_boundary and self.stop_request.requested:
            self.preempted = True
        return self.preempted


def all_ranks_end(distributed: DistributedContext, error: BaseException) -> bool:
    """Return whether all ranks reach this call at about the same time; one rank's checkpoint would be useless."""
    all_came = distributed.meet(_MEETING_TIME_S, f"it has ended with {type(error).__name__}: {error}")
    if not all_came:
        logger.error("Not all ranks end the run, so the training since the latest checkpoint is not saved.")
    return all_came


@contextlib.contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Let another Ctrl-C end the process while an interrupted run winds down; Lightning would ignore it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        yield
        return
    since = time.monotonic()

    def end(signum: int, frame: FrameType | None) -> None:
        if time.monotonic() - since > SAME_SIGNAL_S:
            print_at_once(f"det_lightning: interrupted again; process {os.getpid()} ends at once.\n")
            end_by_signal(signum)

    try:
        signal.signal(signal.SIGINT, end)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_without_traceback(error: BaseException) -> None:
    """Keep Python from printing a traceback if nothing catches ``error``; the status of the process stays the same."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            before(kind, value, trace)

    sys.excepthook = hook


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Attributes:
        resumed: the checkpoint to resume from.
        stop_request: whether this process was asked to end.
        epoch_limit: the maximum number of batches in an epoch (int), or a share of the loader's batches (float).
        overfits: train every epoch on the same batches, the first in dataset order.
        keeps_training_metrics: keep the metrics of the latest training batch for hooks, as the trial returned them.
        keeps_validation_metrics: the same for validation batches.
        hooks_follow_report: other hooks run after a report, before anything else is due at the boundary.
        hooks_follow_validation: the same after a validation.
        has_checkpoint_news: whether the chief has a completed or failed checkpoint that is news to other ranks.
    """

    resumed: CheckpointContent | None = None
    stop_request: StopRequest | None = None
    epoch_limit: float = 1.0
    overfits: bool = False
    keeps_training_metrics: bool = False
    keeps_validation_metrics: bool = False
    hooks_follow_report: bool = False
    hooks_follow_validation: bool = False
    has_checkpoint_news: Callable[[], bool] = lambda: False


class RunLog:
    """Logs the progress of one run on the chief, if ``enabled``."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        self.enabled = logger.isEnabledFor(logging.INFO) and context.distributed.rank == 0
        self._trial = trial
        self._context = context
        self._since_s = self._validates_since_s = 0.0

    def begin(self, batches_trained: int, resume: CheckpointContent | None) -> None:
        """Log the trial and the device it trains on."""
        if not self.enabled:
            return
        size = self._context.distributed.size
        processes = "1 process" if size == 1 else f"{size} processes"
        origin = f", resumed from checkpoint {resume.name}" if resume is not None else ""
        logger.info(
            "Training %s on %s, %s, from batch %d%s.",
            type(self._trial).__name__,
            self._context.device,
            processes,
            batches_trained,
            origin,
        )

    def begin_workload(self) -> None:
        """Begin to time a workload."""
        self._since_s = time.perf_counter()

    def report_training(self, batches_trained: int, metrics: dict[str, Any], batches: int) -> None:
        """Log the averages of a workload of ``batches`` batches."""
        if self.enabled:
            speed = self._describe_speed(time.perf_counter() - self._since_s, batches)
            logger.info("Training after %d batches: %s%s.", batches_trained, _describe(metrics), speed)

    def begin_validation(self) -> None:
        """Begin to time a validation."""
        self._validates_since_s = time.perf_counter()

    def end_validation(self, batches_trained: int, metrics: dict[str, Any], batches: int) -> None:
        """Log the metrics of a validation on a number of ``batches`` of this rank."""
        if self.enabled:
            speed = self._describe_speed(time.perf_counter() - self._validates_since_s, batches)
            logger.info("Validation after %d batches: %s%s.", batches_trained, _describe(metrics), speed)

    def _describe_speed(self, duration_s: float, batches: int) -> str:
        """Return the speed of all ranks together, assuming that each is as fast as this one."""
        if not batches or duration_s <= 0:
            return ""
        done = batches * self._context.distributed.size
        return f"; {done} batches ({done / duration_s:.4g} batches/s) in {duration_s:.3g} s"


def _describe(metrics: dict[str, Any]) -> str:
    scalars = select_scalars(metrics, leave_out=("batches", "epochs"))
    return ", ".join(f"{name}={value:.6g}" for name, value in scalars.items()) or "no metrics that are numbers"


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

    def average(self, window: MetricWindow, users_code_follows: bool) -> list[dict[str, Any]]:
        """Return the metrics of each batch of a workload, averaged over the ranks."""
        with self._ranks.distributed.in_batches():  # a GPU may wait for other ranks
            batches = window.close()
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
        flags = self.early_end.stop_flags(users_code_follows)
        return flags | RankFlag.CHECKPOINT_COMPLETED if self._has_checkpoint_news() else flags

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


def add_position(metrics: dict[str, Any], state: TrialState) -> None:
    """Add the numbers of trained batches and epochs to the metrics, unless a metric already has that name."""
    metrics.setdefault("batches", state.batches_trained)
    metrics.setdefault("epochs", state.epochs_trained)
