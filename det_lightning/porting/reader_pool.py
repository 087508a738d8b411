"""A process for reading untrusted files; a crash or a hang of the process affects one file only."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from det_lightning.porting.file_port import FilePort, import_port, port_file

# A fork runs no code of the project; a new interpreter in the project's directory might.
_CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
_Result = TypeVar("_Result")


class PortingFailed(ValueError):
    """A file could not be ported; other files are not affected."""


class ReaderPool(contextlib.AbstractContextManager["ReaderPool"]):
    """Reads and ports files in another process, and replaces the process after a crash or a timeout.

    Args:
        cpu_s: the processor time allowed for a file, in seconds.
        memory_bytes: the address space to add at most, on systems with such a limit.
    """

    def __init__(self, cpu_s: float = 15.0, memory_bytes: int = 4 * 2**30) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._pool: ProcessPoolExecutor | None = None
        self._used_s = 0.0  # processor time up to the last file

    def port(self, path: pathlib.Path) -> FilePort:
        """Port one file. Raises PortingFailed like :meth:`call`."""
        return dataclasses.replace(self.call(port_file, path), path=path)

    def call(self, function: Callable[..., _Result], path: pathlib.Path, *arguments: object) -> _Result:
        """Return ``function(path, *arguments)``, called in the process.

        Raises PortingFailed if the function raises an error, crashes the process, or takes too long.
        """
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, _CONTEXT, _begin, (self._memory_bytes,))
            self._used_s = 0.0
        before_s = _children_s()
        try:
            call = self._pool.submit(_call, pathlib.Path.cwd(), self._cpu_s, function, path, *arguments)
            reply, self._used_s = call.result()
        except BrokenProcessPool as e:
            self._end()
            # The system counts in ticks.
            if _children_s() - before_s - self._used_s >= 0.9 * self._cpu_s:
                raise PortingFailed(f"it takes longer than {self._cpu_s:g} s to read") from e
            raise PortingFailed("reading it crashed the process") from e
        if isinstance(reply, str):
            raise PortingFailed(reply)
        result: _Result = reply
        return result

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _children_s() -> float:
    """Return the processor time of all ended children of this process."""
    times = os.times()
    return times.children_user + times.children_system


def _begin(memory_bytes: int) -> None:
    here = pathlib.Path.cwd()
    sys.path[:] = [entry for entry in sys.path if entry and pathlib.Path(entry).resolve() != here]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    with contextlib.suppress(ImportError, ValueError, OSError):  # limits exist on Unix only, and not everywhere
        import resource

        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _call(
    directory: pathlib.Path, cpu_s: float, function: Callable[..., object], path: pathlib.Path, *arguments: object
) -> tuple[Any, float]:
    """Return the result of a function or the text of an error, and the processor time used by this process so far."""
    try:
        os.chdir(directory)
        import_port(path)  # outside of the time limit
        _limit_time(cpu_s)
        try:
            return function(path, *arguments), time.process_time()
        finally:
            _limit_time(0)
    except Exception as e:  # a failure of one file must not stop the others
        return f"{type(e).__name__}: {e}", time.process_time()


def _limit_time(cpu_s: float) -> None:
    """Let the system end this process after ``cpu_s`` seconds of processor time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
