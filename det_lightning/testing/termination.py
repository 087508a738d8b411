"""Handles SIGTERM while a trial is checked: it ends pytest and is not blamed on the trial."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import pytest


class _Terminated(BaseException):
    """SIGTERM was received. A BaseException, so that neither a trial nor a check takes it for an error of the trial."""


@contextlib.contextmanager
def sigterm_ends_pytest() -> Iterator[None]:
    """If SIGTERM arrives in the block, end the pytest session with the exit status of a process that it killed.

    Has no effect outside the main thread, where signal handlers cannot be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    came = False

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal came
        came = True
        if callable(before):
            before(number, frame)
        raise _Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except BaseException:
        # Other code on the way here may have turned _Terminated into another error.
        if not came:
            raise
    finally:
        # None means a handler that Python did not install and cannot restore.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    if came:
        pytest.exit("received SIGTERM: the check that was under way has no result", returncode=128 + signal.SIGTERM)
