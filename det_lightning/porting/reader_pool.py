"""A process that ports files, so that a file that cannot be read affects nothing else, however it fails."""

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
from det_lightning.porting.libraries import Libraries

# A fork runs no code of the project, as an interpreter that starts in its directory might.
_CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
_UNKNOWN = Libraries()
_Result = TypeVar("_Result")


class PortingFailed(ValueError):
    """A file could not be ported, for a reason that says nothing about other files."""


class ReaderPool(contextlib.AbstractContextManager["ReaderPool"]):
    """Ports files in another process, which is replaced after a file that crashed it or took too long.

    Args:
        cpu_s: how much time of the processor a file may take.
        memory_bytes: how much address space the process may add, where the system can limit it.
    """

    def __init__(self, cpu_s: float = 15.0, memory_bytes: int = 4 * 2**30) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._pool: ProcessPoolExecutor | None = None
        self._used_s = 0.0  # by the process, up to its last file

    def port(self, path: pathlib.Path, libraries: Libraries = _UNKNOWN) -> FilePort:
        """Port one file. Raises PortingFailed as :meth:`call` does."""
        return dataclasses.replace(self.call(port_file, path, libraries), path=path)

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
    """Return the time of the processor that the ended children of this process took."""
    times = os.times()
    return times.children_user + times.children_system


def _begin(memory_bytes: int) -> None:
    here = pathlib.Path.cwd()
    sys.path[:] = [entry for entry in sys.path if entry and pathlib.Path(entry).resolve() != here]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    with contextlib.suppress(ImportError, ValueError, OSError):  # only Unix has such limits, and not each all of them
        import resource

        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _call(
    directory: pathlib.Path, cpu_s: float, function: Callable[..., object], path: pathlib.Path, *arguments: object
) -> tuple[Any, float]:
    """Return the result of a function or the text of its error, and the processor time of this process in all."""
    try:
        os.chdir(directory)
        import_port(path)  # which takes its time, too
        _limit_time(cpu_s)
        try:
            return function(path, *arguments), time.process_time()
        finally:
            _limit_time(0)
    except Exception as e:  # whatever a file does to its reader, the others must still be ported
        return f"{type(e).__name__}: {e}", time.process_time()


def _limit_time(cpu_s: float) -> None:
    """Let the system end this process once it has used the processor for so long; 0 is no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
