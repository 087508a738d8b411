"""A budget of processor time, which other work on the machine does not use up. Imports nothing slow."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from det_lightning.testing.checks import NotCompared

#: The processor time of a check, in seconds.
BUDGET_S = 300
#: How often to look at the processor time of other processes.
POLL_S = 2.0
# Processes that use no processor for this long wait for each other; a wait alone uses less than this between two looks.
_IDLE_S = 120
_PROGRESS_S = 0.04


class _Spent(BaseException):
    """The budget is spent. It is a BaseException, so that no trial and no check catches it as an error of the trial."""


def describe_budget(what: str, seconds: float) -> str:
    """Explain why a check was given up, and the remedy."""
    return f"{what} used {seconds:g} s of processor time; train fewer batches, with --trial-batches, or a smaller model"


class Stuck(Exception):
    """Processes crashed, or wait for each other forever; the message says so."""


class ProcessorMeter:
    """Watches the processor time of other processes; on a busy machine the clock says little."""

    def __init__(self, pids: Sequence[int], what: str, budget_s: float = BUDGET_S) -> None:
        self._pids = pids
        self._what = what
        self._budget_s = budget_s
        self._used = 0.0
        self._started = self._last_use = time.monotonic()

    def check(self) -> None:
        """Raise NotCompared once the processes exceed their budget, and Stuck once all have waited for long."""
        used = sum(map(self._seconds, self._pids))
        if used > self._budget_s * len(self._pids):
            raise NotCompared(describe_budget(self._what, used))
        is_busy = used - self._used > _PROGRESS_S
        self._used = used
        if is_busy:
            self._last_use = time.monotonic()
        elif time.monotonic() - self._last_use > _IDLE_S:
            raise Stuck(f"For {_IDLE_S} s none of the processes did anything: they wait for each other.")

    def _seconds(self, pid: int) -> float:
        """Return the processor time of a process, or elapsed time where the system does not tell; 0 if it has ended."""
        if not Path("/proc/self/stat").exists():
            return time.monotonic() - self._started
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0


@contextlib.contextmanager
def within_processor_time(seconds: float, what: str) -> Iterator[None]:
    """Raise NotCompared in the block after so many seconds of processor time, where the system has such timers."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise _Spent

    with handle_signal(signal.SIGPROF, end):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        except _Spent:
            raise NotCompared(describe_budget(what, seconds)) from None
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


@contextlib.contextmanager
def handle_signal(number: int, handler: Callable[[int, FrameType | None], NoReturn]) -> Iterator[None]:
    """Handle a signal in the block of the main thread."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        # None means a handler that Python did not install and cannot restore.
        signal.signal(number, signal.SIG_DFL if before is None else before)
