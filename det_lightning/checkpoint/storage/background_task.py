"""Work in another thread that no signal can tear: it is started whole or not at all, and its outcome is taken once.

Python runs the handler of a signal in the main thread, between any two of its instructions; that of Ctrl-C raises
there. Within the starting of a thread this leaves threads that nobody knows of, or that wait for ever.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

__all__ = ["BackgroundTask", "all_signals_deferred", "dead_workers_deferred", "signal_deferred"]

_Result = TypeVar("_Result")

# So long a signal waits for its handler while the main thread waits for another one.
_POLL_S = 0.05


@contextlib.contextmanager
def signal_deferred(number: int) -> Iterator[None]:
    """Run the handler of a signal that comes inside when the block has ended, however it ends.

    Only handlers in Python can raise; without one, and outside of the main thread, nothing is done.
    """
    handler: Any = signal.getsignal(number)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(signum: int, frame: FrameType | None) -> None:
        came.append((signum, frame))

    try:
        signal.signal(number, note)
        yield
    finally:
        if signal.getsignal(number) is note:  # otherwise someone has installed another one inside
            signal.signal(number, handler)
        if came:
            handler(*came[0])


@contextlib.contextmanager
def all_signals_deferred() -> Iterator[None]:
    """Do the same for all signals; for what takes no time."""
    with contextlib.ExitStack() as stack:
        for number in sorted(signal.valid_signals()):
            if callable(signal.getsignal(number)):
                stack.enter_context(signal_deferred(number))
        yield


def dead_workers_deferred() -> contextlib.AbstractContextManager[None]:
    """Raise after the block what a worker of a ``DataLoader`` that dies inside of it raises.

    torch raises that in the handler of SIGCHLD, wherever the main thread is: a writer would take it for an error of
    its own.
    """
    number = getattr(signal, "SIGCHLD", None)  # not on Windows
    return contextlib.nullcontext() if number is None else signal_deferred(number)


class BackgroundTask(Generic[_Result]):
    """Work that runs in a thread of its own, from its construction on.

    A process that exits waits for it. Nothing is shared with the thread but its end: a lock that both threads take
    could be left locked by a main thread that is interrupted.

    Construct it, and store it, where signals are deferred (:func:`all_signals_deferred`): only then is it there for
    the caller if and only if its thread runs.

    Args:
        work: is called in the thread.
        name: of the thread.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, work: Callable[[], _Result], name: str) -> None:
        self._work = work
        self._results: list[_Result] = []
        self._error: BaseException | None = None
        self._done = False
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as e:  # raised where the outcome is taken
            self._error = e
        self._done = True

    def is_done(self) -> bool:
        """Tell whether the work is done."""
        return self._done

    def wait(self) -> None:
        """Wait until the thread has ended. An interrupted wait can be repeated."""
        # An interrupted join() takes a thread that runs on for one that has ended, until Python 3.13.
        while not self._done:
            with all_signals_deferred():
                self._thread.join(_POLL_S)
        with all_signals_deferred():
            self._thread.join()

    def result(self) -> _Result:
        """Wait; return what the work returned, or raise what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]
