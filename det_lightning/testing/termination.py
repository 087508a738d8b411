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
    """SIGTERM was received. Neither a trial nor a check takes it for an error of the trial."""


@contextlib.contextmanager
def sigterm_ends_pytest() -> Iterator[None]:
    """End the session of pytest, with the exit status of a process that SIGTERM has ended, if it comes in the block.

    Outside of the main thread, where signals cannot be handled, they have their usual effect.
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
        # Between the signal and here other code may have made another error of it.
        if not came:
            raise
    finally:
        # None: a handler that Python did not install, and cannot restore.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    if came:
        pytest.exit("received SIGTERM: the check that was under way has no result", returncode=128 + signal.SIGTERM)
