"""Smoke-tests a ported project: starts each entry point that should run for a few batches, in a copy of the files."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable

from det_lightning.files.logs import find_error, read_end
from det_lightning.porting.entry_points import EntryPoint, Outcome
from det_lightning.porting.facts import Kind
from det_lightning.porting.project import ProjectPort, walk_files

#: With this environment variable, ``Trainer.fit`` and ``det-lightning run`` train a few batches only.
_VARIABLE = "DET_LIGHTNING_TRY"
# Without the directory of the project: modules there may shadow others.
_CLI = "import sys; del sys.path[0]; from det_lightning.cli import main; main()"
_TIMEOUT_S = 300.0
# A script of the Core API that never asks for preemption ends a smoke run by a signal.
_ENDED_WELL = (0, -signal.SIGTERM)
# The time for a process to end after SIGTERM.
_GRACE_S = 30.0
_MOST_BYTES = 2 * 1024**3


def try_project(project: ProjectPort, paths: Iterable[pathlib.Path]) -> ProjectPort:
    """Try all runnable configurations and scripts of a project in a copy of the files, and return it with the results.

    Raises ValueError if the files below ``paths`` are too large to copy.
    """
    with tempfile.TemporaryDirectory(prefix="det-lightning-try-") as directory:
        copy = _Copy(pathlib.Path(directory), list(paths))
        for port in project.files:
            if port.changed and port.may_be_written:
                copy.locate(port.path).write_text(port.after, port.encoding, newline="")
        tried = [_try(entry, copy) for entry in project.entry_points]
    return dataclasses.replace(project, entry_points=tried)


class _Copy:
    """A copy of the files below some paths, with the same relative positions."""

    def __init__(self, directory: pathlib.Path, paths: list[pathlib.Path]) -> None:
        found = [path.resolve() for path in paths]
        here = pathlib.Path.cwd()
        self._has_here = all(path.is_relative_to(here) for path in found)
        self._base = here if self._has_here else pathlib.Path(os.path.commonpath([path.parent for path in found]))
        self._directory = directory / "code"
        self.experiments = directory / "experiments"
        size = 0
        for file in (file for path in found for file in walk_files(path)):
            size += file.stat().st_size
            if size > _MOST_BYTES:
                raise ValueError(f"--try copies at most {_MOST_BYTES / 1024**3:g} GiB, and the project is larger.")
            target = self.locate(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
            target.chmod(target.stat().st_mode | 0o200)

    def locate(self, path: pathlib.Path) -> pathlib.Path:
        return self._directory / path.resolve().relative_to(self._base)

    def find_directory(self, entry: EntryPoint) -> pathlib.Path:
        """Return the directory to start an entry point in."""
        return self.locate(entry.project if entry.port.is_configuration or not self._has_here else pathlib.Path())


def _try(entry: EntryPoint, copy: _Copy) -> EntryPoint:
    command = _command(entry, copy) if entry.outcome is Outcome.moves else None
    if command is None:
        return entry
    error = _run(command, copy.find_directory(entry))
    if error is not None and entry.port.is_configuration:
        logs = sorted(copy.experiments.glob("*/trials/*/log.txt"))
        error = find_error(read_end(logs[-1]) if logs else "") or error
    shutil.rmtree(copy.experiments, ignore_errors=True)
    outcome = entry.outcome if error is None else Outcome.waits
    return dataclasses.replace(entry, outcome=outcome, tried=True, error=error or "")


def _command(entry: EntryPoint, copy: _Copy) -> list[str] | None:
    """Return the command for an entry point in the copy; None if it is not to be tried."""
    path = str(copy.locate(entry.port.path))
    if entry.port.is_configuration:
        options = ["--try", "--slots", "1", "--experiments", str(copy.experiments)]
        return [sys.executable, "-c", _CLI, "run", path, str(copy.locate(entry.project)), *options]
    if entry.port.facts.kind is not Kind.script or entry.command.endswith(" CONFIG"):
        return None
    return [sys.executable, *(["-m", "det_lightning"] if "-m det_lightning" in entry.command else []), path]


def _run(command: list[str], directory: pathlib.Path) -> str | None:
    """Return the error of a program that fails; None if it succeeds or still runs after minutes."""
    environment = {**os.environ, _VARIABLE: "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
        output.seek(0)
        return None if status in _ENDED_WELL else find_error(output.read()) or f"it ended with status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
