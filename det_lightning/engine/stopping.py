"""Ending a run early: the trial asks for the end, or the process was asked or signalled to end."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

from det_lightning.distributed.rank_exchange import RankExchange
from det_lightning.escaping import get_logger
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
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

    The wishes of the ranks travel with the metrics of a workload or a validation. Ranks exchange wishes again before
    going on only if user code has since run on any rank, or a checkpoint was written.
    """

    def __init__(self, context: PyTorchTrialContext, stop_request: StopRequest | None, exchange: RankExchange) -> None:
        self.stop_request = stop_request or StopRequest(exit_code=0)
        self.is_alone = exchange.is_alone
        self.preempted = False
        self._context = context
        self._exchange = exchange
        self._agreed: RankFlag | None = None

    def wishes(self, users_code_follows: bool) -> RankFlag:
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
            wishes = self.wishes(users_code_follows=False)
            agreed = RankFlag(self._exchange.unite(wishes))
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
    """Return whether all ranks call this at about the same time; a checkpoint of a lone rank would be useless."""
    all_came = distributed.meet(_MEETING_TIME_S, f"it has ended with {type(error).__name__}: {error}")
    if not all_came:
        logger.error("Not all ranks end the run, so the training since the latest checkpoint is not saved.")
    return all_came


@contextlib.contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Let another Ctrl-C end the process during the end of interrupted work; Lightning would ignore the Ctrl-C."""
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
