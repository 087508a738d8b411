"""Ending a process by a signal, or by a second Ctrl-C while the first one is handled."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

# GNU timeout and some launchers send a signal twice, to a process and to its group, within this time.
SAME_SIGNAL_S = 2.0


@contextlib.contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """Let a further Ctrl-C, which Lightning ignores, end the process while interrupted work is finished."""
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
    """End the process as an unhandled signal does."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def print_at_once(message: str) -> None:
    """Write to stderr from a signal handler, which may run in the middle of a log record."""
    try:
        os.write(2, message.encode())
    except OSError:  # nobody reads it any more
        return
