"""Porting files in a process of its own: one that cannot be read, however it fails, takes nothing else along."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from types import TracebackType
from typing import IO, Any

import det_lightning
from det_lightning.porting.file_port import FilePort, port_file
from det_lightning.porting.findings import Finding, Severity

_START_TIMEOUT_S = 120.0
_LAST_MOMENTS_S = 10.0
_CODE = "import sys; sys.path[:] = {path!r}; from det_lightning.porting.separate_process import serve; serve()"


class PortingFailed(ValueError):
    """A file could not be ported, for a reason that says nothing about other files."""


class PortingProcess:
    """Ports files in another process, which is started again after a file that crashed it or took too long.

    Args:
        timeout_s: how long a file may take, in seconds.
    """

    def __init__(self, timeout_s: float = 15.0) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._reader = concurrent.futures.ThreadPoolExecutor(1)

    def port(self, path: pathlib.Path) -> FilePort:
        """Port one file; see :func:`port_file`.

        Raises:
            PortingFailed: the file cannot be read, crashes its reader, or takes too long.
        """
        process = self._process = self._process or self._start()
        _send(process, {"path": os.fspath(path), "timeout_s": self._timeout_s})
        reply = self._receive(process, self._timeout_s, f"it takes longer than {self._timeout_s:g} s to read")
        if "error" in reply:
            raise PortingFailed(reply["error"])
        findings = [
            Finding(line, Severity(severity), reason, advice) for line, severity, reason, advice in reply["findings"]
        ]
        return FilePort(path, reply["before"], reply["after"], findings, reply["encoding"])

    def __enter__(self) -> PortingProcess:
        """Return itself; the process is started when it is needed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._end()
        self._reader.shutdown()

    def _start(self) -> subprocess.Popen[str]:
        # Not from the working directory: the files there are what is to be read, and none of it is to be imported.
        here = str(pathlib.Path(det_lightning.__file__).parents[1])
        path = [entry for entry in sys.path if entry and pathlib.Path(entry).resolve() != pathlib.Path.cwd()]
        command = [sys.executable, "-c", _CODE.format(path=[*path, here])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii")
        self._receive(self._process, _START_TIMEOUT_S, "the process that reads it did not start")
        return self._process

    def _receive(self, process: subprocess.Popen[str], timeout_s: float, too_late: str) -> dict[str, Any]:
        try:
            line = self._reader.submit(_stdout(process).readline).result(timeout_s)
        except concurrent.futures.TimeoutError:
            self._end()
            raise PortingFailed(too_late) from None
        except BaseException:
            self._end()
            raise
        if not line.endswith("\n"):
            raise PortingFailed(f"reading it ended the process that did so ({_status(self._end(_LAST_MOMENTS_S))})")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _end(self, wait_s: float = 0.0) -> int:
        """End the process, after some time to end by itself; return its exit code."""
        process = self._process
        self._process = None
        if process is None:
            return 0
        try:
            code = process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what it was sent when it had died already
                if pipe is not None:
                    pipe.close()
        return code


def serve() -> None:
    """Port the files that the standard input names, one a line, and answer for each on the standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks ends this process
    replies = sys.stdout
    sys.stdout = sys.stderr
    _reply(replies, {})
    for line in sys.stdin:
        asked = json.loads(line)
        _set_alarm(int(asked["timeout_s"]) + 60)
        reply = _answer(pathlib.Path(asked["path"]))
        _set_alarm(0)
        _reply(replies, reply)


def _set_alarm(after_s: int) -> None:
    """Let the system end this process after a time, in case whoever asked is gone by then; 0 for never."""
    if hasattr(signal, "alarm"):
        signal.alarm(after_s)


def _answer(path: pathlib.Path) -> dict[str, Any]:
    try:
        port = port_file(path)
    except Exception as e:  # whatever a file does to its reader, the others are still to be ported
        return {"error": f"{type(e).__name__}: {e}"}
    findings = [dataclasses.astuple(finding) for finding in port.findings]
    return {"before": port.before, "after": port.after, "findings": findings, "encoding": port.encoding}


def _reply(stream: IO[str], content: dict[str, Any]) -> None:
    stream.write(json.dumps(content) + "\n")
    stream.flush()


def _send(process: subprocess.Popen[str], content: dict[str, Any]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # what it died of is seen where its answer is awaited
            process.stdin.write(json.dumps(content) + "\n")
            process.stdin.flush()


def _stdout(process: subprocess.Popen[str]) -> IO[str]:
    if process.stdout is None:
        raise RuntimeError("The process was started without a pipe.")
    return process.stdout


def _status(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):  # a signal that has no name
        return signal.Signals(-code).name
    return f"signal {-code}"
