"""What handlers of signals do."""

from __future__ import annotations

import os
import signal

# GNU timeout and some launchers send a signal twice, to a process and to its group, within this time.
SAME_SIGNAL_S = 2.0


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
