"""When a run ends before its length is reached: the trial wants to, or a process was asked to end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

from det_lightning.pytorch.context import PyTorchTrialContext

__all__ = [
    "SAME_SIGNAL_S",
    "EarlyEnd",
    "Preemption",
    "end_by_signal",
    "interrupts_come_through",
    "interrupts_end_the_process",
    "print_at_once",
]

# What GNU timeout and some launchers send twice, to a process and to its group, arrives within this time.
SAME_SIGNAL_S = 2.0


class Preemption(Protocol):
    """Knows whether this process was asked to end; see ``det_lightning.callbacks.PreemptionHandler``."""

    exit_code: int

    @property
    def requested(self) -> bool:
        """Whether it was."""


class EarlyEnd:
    """Agrees with the other ranks on whether the run ends.

    Args:
        context: the trial's.
        preemption: see :class:`Preemption`; None if nothing ends the run from outside.

    Attributes:
        preempted: the run ends since a process was asked to.
    """

    def __init__(self, context: PyTorchTrialContext, preemption: Preemption | None) -> None:
        self._context = context
        self._preemption = preemption
        self.preempted = False

    def agree(self) -> bool:
        """Tell whether any rank wants to stop, or was asked to end; all ranks have to ask."""
        wishes, distributed = (self._context.get_stop_requested(), self._asked()), self._context.distributed
        of_all = [wishes] if distributed.size == 1 else distributed.allgather(wishes)
        stops = any(requested for requested, _ in of_all)
        # A trial that wanted to stop is done, and must not be started again.
        self.preempted = any(asked for _, asked in of_all) and not stops
        return stops or self.preempted

    def must_come_now(self, at_boundary: bool) -> bool:
        """Tell whether the run ends without a boundary: its only process was asked to, and need not ask others."""
        if self._context.distributed.size == 1 and not at_boundary and self._asked():
            self.preempted = True
        return self.preempted

    def _asked(self) -> bool:
        return self._preemption is not None and self._preemption.requested


@contextlib.contextmanager
def interrupts_come_through() -> Iterator[None]:
    """Raise a ``KeyboardInterrupt`` that Lightning makes an exit of, and let the next one be heard again."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as e:
        interrupt = e.__context__
        if type(e) is not SystemExit or not isinstance(interrupt, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise interrupt from None


@contextlib.contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Let a further Ctrl-C end the process, while what the first one has interrupted is brought to its end.

    Lightning ignores all further ones.
    """
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


def end_by_signal(signum: int) -> None:
    """End the process as a signal does that nobody handles."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def print_at_once(message: str) -> None:
    """Write to stderr in the handler of a signal, which may come in the middle of a log record."""
    try:
        os.write(2, message.encode())
    except OSError:  # nobody reads it any more
        return
