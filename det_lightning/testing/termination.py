"""SIGTERM while a trial is checked: it ends pytest, and says nothing about the trial."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import pytest


class _Terminated(BaseException):
    """SIGTERM has come. Neither a trial nor a check takes it for an error of the trial."""


class _Handler:
    """Raises out of whatever the main thread does, after the handler that was there before."""

    def __init__(self) -> None:
        self.came = False
        self._before = signal.getsignal(signal.SIGTERM)

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        self.came = True
        if callable(self._before):
            self._before(number, frame)
        raise _Terminated

    def restore(self) -> None:
        # None: a handler that Python did not install, and cannot restore.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)


@contextlib.contextmanager
def sigterm_ends_pytest() -> Iterator[None]:
    """End the session of pytest, with the exit status of a process that SIGTERM has ended, if it comes in the block.

    Outside of the main thread, where signals cannot be handled, they have their usual effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    except BaseException:
        # Between the signal and here other code may have made another error of it.
        if not handler.came:
            raise
    finally:
        handler.restore()
    if handler.came:
        pytest.exit("SIGTERM has come: the check that was under way has no result", returncode=128 + signal.SIGTERM)
