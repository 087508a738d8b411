"""Ending a run before its length is reached, because the trial wants to or a process was asked or signalled to."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

from det_lightning.core._distributed import DistributedContext
from det_lightning.core._signals import SAME_SIGNAL_S, end_by_signal, print_at_once

logger = logging.getLogger(__name__)

# If all ranks come to the same end, they do so at about the same time.
_MEETING_TIME_S = 10.0


@dataclasses.dataclass
class StopRequest:
    """Whether this process was asked to save its run and end, and with which exit code."""

    exit_code: int
    requested: bool = False


def all_ranks_end(distributed: DistributedContext) -> bool:
    """Return whether all ranks call this at about the same time; one that ends alone would wait in vain."""
    if distributed.size == 1:
        return True
    came = threading.Event()

    def meet() -> None:
        # Not an allgather: ranks that go on may be in one, and would take this for their own.
        with contextlib.suppress(RuntimeError):
            distributed.gather(None)
            came.set()

    threading.Thread(target=meet, name="det_lightning-meeting", daemon=True).start()
    if not came.wait(_MEETING_TIME_S):
        logger.error("Not all ranks end the run, so what was trained since the latest checkpoint is not saved.")
    return came.is_set()


@contextlib.contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Let another Ctrl-C, which Lightning ignores, end the process while it finishes interrupted work."""
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
