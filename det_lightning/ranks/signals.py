"""Handlers of signals that ask a process to end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

# GNU timeout and some launchers send a signal twice within this time, to a process and to its group.
SAME_SIGNAL_S = 2.0


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def end_by_signal(signum: int) -> None:
    """End the process as an unhandled signal does."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def print_at_once(message: str) -> None:
    """Write to stderr from a signal handler: logging may be interrupted in the middle of a record."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(2, message.encode())


class EndSignals:
    """Handles signals that ask the process to end: calls ``on_first`` on the first, and ends the process on a second.

    Previously installed handlers are also called on the first signal. A fork of the process just ends.
    """

    def __init__(self, on_first: Callable[[int], object]) -> None:
        self._on_first = on_first
        self._first_s: float | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self.installed = False

    def remember(self, signums: Iterable[int]) -> None:
        """Remember the current handlers of the signals, for :meth:`restore`."""
        self._before = {signum: signal.getsignal(signum) for signum in signums}
        self._first_s = None

    def install(self) -> bool:
        """Handle the remembered signals; outside of the main thread, do nothing and return False."""
        if not _in_main_thread():
            return False
        self._process = os.getpid()
        self.installed = True
        for signum in self._before:
            signal.signal(signum, self._handle)
        return True

    def restore(self) -> None:
        if self.installed and _in_main_thread():
            for signum, handler in self._before.items():
                # None: a handler that Python did not install, and cannot restore.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
            self.installed = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process:  # in a fork, such as a worker of a loader
            end_by_signal(signum)
        elif self._first_s is None:
            self._first_s = now
            self._on_first(signum)
            before = self._before[signum]
            # Python's own handler of SIGINT would raise in the middle of a batch.
            if callable(before) and before is not signal.default_int_handler:
                before(signum, frame)
        elif now - self._first_s > SAME_SIGNAL_S:
            print_at_once(f"det_lightning: received a second signal; process {self._process} ends at once.\n")
            end_by_signal(signum)
