"""Porting files in a separate process, so that a file that cannot be read affects nothing else, however it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any

import det_lightning
from det_lightning.porting.file_port import FilePort, import_port, port_file

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_CODE = "import sys; sys.path[:] = {path!r}; from det_lightning.porting.separate_process import serve; serve{limits}"
_TOO_LATE = 1  # the exit code of a process that its watchdog ended


class PortingFailed(ValueError):
    """A file could not be ported, for a reason that says nothing about other files."""


class PortingProcess(contextlib.AbstractContextManager["PortingProcess"]):
    """Ports files in another process, which is restarted after a file that crashed it or took too long.

    Args:
        timeout_s: how long a file may take.
        memory_bytes: how much address space the process may have, where the system can limit it.
    """

    def __init__(self, timeout_s: float = 15.0, memory_bytes: int = 4 * 2**30) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[str] | None = None

    def port(self, path: pathlib.Path) -> FilePort:
        """Port one file; raises PortingFailed if it cannot be read, crashes its reader, or takes too long."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None, "it is started with pipes"
        started_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # the reply is missing then
            process.stdin.write(json.dumps([str(pathlib.Path.cwd()), os.fspath(path)]) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line.endswith("\n"):
            code = process.wait()
            self._end()
            if code == _TOO_LATE and time.monotonic() - started_s >= self._timeout_s:
                raise PortingFailed(f"it takes longer than {self._timeout_s:g} s to read")
            raise PortingFailed(f"reading it crashed the process ({_status(code)})")
        reply = json.loads(line)
        if "error" in reply:
            raise PortingFailed(reply["error"])
        return dataclasses.replace(_plain_form().validate_python(reply), path=path)

    def __exit__(self, *error: object) -> None:
        self._end()

    def _start(self) -> subprocess.Popen[str]:
        # Not from the working directory: the files there are to be read, and must not be imported.
        here = str(pathlib.Path(det_lightning.__file__).parents[1])
        path = [entry for entry in sys.path if entry and pathlib.Path(entry).resolve() != pathlib.Path.cwd()]
        command = [
            sys.executable,
            "-c",
            _CODE.format(path=[*path, here], limits=(self._timeout_s, self._memory_bytes)),
        ]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes
                self._process = None


def serve(timeout_s: float, memory_bytes: int) -> None:
    """Port each file that the standard input names, as seen from the directory that is named with it.

    A watchdog ends the process when a file takes too long.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):  # only Unix has such limits, and not each all of them
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    replies = sys.stdout
    sys.stdout = sys.stderr
    with pathlib.Path(os.devnull).open("w") as ignored:
        for line in sys.stdin:
            directory, path = json.loads(line)
            os.chdir(directory)
            reply = _answer(pathlib.Path(path), timeout_s, ignored)
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


def _answer(path: pathlib.Path, timeout_s: float, ignored: IO[str]) -> Any:
    try:
        # On a slow disk the first import of the libraries takes longer than any file.
        import_port(path)
        plain_form = _plain_form()
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=ignored)
        try:
            return plain_form.dump_python(port_file(path), mode="json")
        finally:
            faulthandler.cancel_dump_traceback_later()
    except Exception as e:  # whatever a file does to its reader, the others must still be ported
        return {"error": f"{type(e).__name__}: {e}"}


@functools.cache
def _plain_form() -> TypeAdapter[FilePort]:
    from pydantic import TypeAdapter  # too slow to import for --help

    return TypeAdapter(FilePort)


def _status(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):  # a signal that has no name
        return signal.Signals(-code).name
    return f"signal {-code}"
