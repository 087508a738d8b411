"""Finds names that the installed libraries lack, with pyrefly, without importing the project or a library."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from typing import Any

from det_lightning.missing_parts import how_to_install
from det_lightning.porting import installed
from det_lightning.porting.facts import OF_DETERMINED
from det_lightning.porting.file_port import FilePort
from det_lightning.porting.findings import Finding, Need, Premise, Severity
from det_lightning.porting.installed import Guards
from det_lightning.startup_hook import is_accepted

# The time for pyrefly.
_MOST_S = 120
# No configuration of the project is read, no interpreter is run, and no comment of the project hides an error. The
# libraries come before the stubs in pyrefly, which may be of other releases.
_CONFIG = {
    "preset": "default",
    "site-package-path": [],
    "skip-interpreter-query": True,
    "python-version": "{}.{}".format(*sys.version_info),
    "python-platform": sys.platform,
    "disable-search-path-heuristics": True,
    "disable-project-excludes-heuristics": True,
    "use-ignore-files": False,
    "enabled-ignores": [],
}
# By kind of error: the message, and the reason of the finding.
_KINDS = {
    "missing-module-attribute": (r"Could not import `(\w+)` from `(\w[\w.]*)`", "{1}.{0} is not in {2}"),
    "missing-attribute": (r"No attribute `(\w+)` in module `(\w[\w.]*)`", "{1}.{0} is not in {2}"),
    "missing-import": (r"Cannot find module `()(\w[\w.]*)`", "the module {1} is not in {2}"),
    "unexpected-keyword": (
        r"Unexpected keyword argument `(\w+)` in function `(\w+\.[\w.]+?)(?:\.__\w+__)?`",
        "{1}() takes no {0}= in {2}",
    ),
    "missing-argument": (
        r"Missing argument `(\w+)` in function `(\w+\.[\w.]+?)(?:\.__\w+__)?`",
        "{1}() needs {0}= in {2}",
    ),
    "not-callable": (
        r"Expected a callable, got `()Module\[(\w[\w.]*)\]`",
        "{1} is a module in {2}, no function",
    ),
}
_LINE_END = re.compile(r"\r\n|\r|\n")


class _NotChecked(Exception):
    """pyrefly did not end as expected."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """The Python code of a ported file."""

    port: FilePort
    text: str
    numbers: list[int]  # the lines in the ported file, by the lines of the program
    guards: Guards

    @functools.cached_property
    def lines(self) -> list[str]:
        return ["", *_LINE_END.split(self.text)]

    @functools.cached_property
    def _changes(self) -> Sequence[tuple[str, int, int, int, int]]:
        before, after = (text.split("\n") for text in (self.port.before, self.port.after))
        return difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()

    def find_line(self, line: int) -> int:
        """Return the line in the file before porting for a line of the program."""
        line = self.numbers[line]
        if not self.port.changed:
            return line
        found = ((start, end, first) for _, start, end, first, last in self._changes if first < line <= last)
        return next((min(start + line - first, max(end, 1)) for start, end, first in found), 0)


@dataclasses.dataclass(frozen=True)
class _Lack:
    """A name that a library lacks, as pyrefly says."""

    program: _Program
    line: int  # of the program
    kind: str
    owner: str  # the module or function
    name: str  # of an attribute or argument, or empty

    @property
    def package(self) -> str:
        return self.owner.partition(".")[0]

    def is_certain(self) -> bool:
        """Return whether the library's files do not have the name either."""
        if self.kind == "missing-import":
            return installed.lacks_module(self.owner)
        is_attribute = self.kind in ("missing-attribute", "missing-module-attribute")
        return not is_attribute or installed.lacks_name(self.owner, self.name)

    def as_finding(self) -> Finding:
        _, reason = _KINDS[self.kind]
        shown = reason.format(self.name, self.owner, installed.find_release(self.package))
        line = self.program.find_line(self.line)
        return Finding(line, Severity.problem, shown, "change the line for this release", premise=Premise.changed)


def check_libraries(ports: list[FilePort], most_s: int = _MOST_S) -> tuple[list[FilePort], list[str]]:
    """Add a problem to ported files for each name that a library lacks; also return sentences on what was not checked.

    Modules of the project are not libraries, even under a library's name.
    """
    if importlib.util.find_spec("pyrefly") is None:
        how = how_to_install("port")
        return ports, [f"pyrefly is not installed: names of libraries were not checked ({how})"]
    programs = [program for port in ports if (program := _read_program(port)) is not None]
    try:
        errors = _run_pyrefly([program.text for program in programs], most_s) if programs else []
    except _NotChecked as e:
        return ports, [f"names of libraries were not checked: {e}"]
    modules = [port.path for port in ports if port.path.suffix == ".py"]
    own = {path.parent.name if path.stem == "__init__" else path.stem for path in modules}
    lacks = [lack for error in errors if (lack := _read_error(error, programs)) and lack.package not in own]
    found: dict[pathlib.Path, list[Finding]] = {}
    absent: set[str] = set()
    for lack in lacks:
        if not installed.is_installed(lack.package):
            absent.update([lack.package] if lack.kind == "missing-import" else [])
        elif lack.is_certain():
            found.setdefault(lack.program.port.path, []).append(lack.as_finding())
    left = [sorted({*port.findings, *found.get(port.path, [])}) for port in ports]
    checked = [dataclasses.replace(port, findings=findings) for port, findings in zip(ports, left, strict=True)]
    # Directories, and modules that were not given, are the project's too.
    others = sorted(absent.difference(*(path.absolute().parts for path in modules)))
    others = [name for name in others if not any((path.parent / f"{name}.py").is_file() for path in modules)]
    return checked, [f"not installed, not checked: {', '.join(others)}"] if others else []


def _read_error(error: dict[str, Any], programs: list[_Program]) -> _Lack | None:
    """Return what an error says is missing; None for other errors, guarded code, and lines that a comment accepts."""
    kind = error["name"]
    found = re.fullmatch(_KINDS[kind][0], error["concise_description"])
    if found is None:
        return None
    program = programs[int(pathlib.Path(error["path"]).stem)]
    line = program.lines[error["line"]]
    lack = _Lack(program, error["line"], kind, owner=found[2], name=found[1])
    is_left_out = program.guards.hold(lack.line, line) or is_accepted(line) or lack.package in OF_DETERMINED
    return None if is_left_out else lack


def _read_program(port: FilePort) -> _Program | None:
    """Return the program in a ported file, or None for a file without Python, or one that stays on Determined."""
    from det_lightning.porting.notebooks import read_program  # imports libcst

    is_code = port.path.suffix.lower() in (".py", ".pyw", ".ipynb") and port.after
    if not is_code or any(found.needs_determined is Need.file for found in port.findings):
        return None
    text = port.after
    numbers = list(range(len(_LINE_END.split(text)) + 1))
    if port.path.suffix.lower() == ".ipynb":
        text, numbers = read_program(text)
    return _Program(port, text, numbers, Guards(text))


def _run_pyrefly(texts: Collection[str], most_s: int) -> list[dict[str, Any]]:
    """Return pyrefly's errors in programs; each error's path is the number of its program."""
    from pyrefly.__main__ import get_pyrefly_bin

    with tempfile.TemporaryDirectory(prefix="det-lightning-port-") as name:
        directory = pathlib.Path(name)
        config = {**_CONFIG, "search-path": [str(root) for root in installed.find_roots()]}
        # A value of JSON is one of TOML too.
        settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
        (directory / "pyrefly.toml").write_text(settings, encoding="utf-8")
        for number, text in enumerate(texts):
            (directory / f"{number}.py").write_text(text, "utf-8", "replace", newline="")
        options = ["--config", "pyrefly.toml", "--output-format", "json", *(f"--only={kind}" for kind in _KINDS)]
        command = [get_pyrefly_bin(), "check", *options, *(f"{number}.py" for number in range(len(texts)))]
        found: list[dict[str, Any]] = json.loads(_run(command, directory, most_s))["errors"]
        return found


def _run(command: list[str], directory: pathlib.Path, most_s: int) -> bytes:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYREFLY_")}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=directory, env=environment, stdout=pipe, stderr=pipe) as process:
        try:
            output, errors = process.communicate(timeout=most_s)
        except subprocess.TimeoutExpired as e:
            process.kill()
            raise _NotChecked(f"pyrefly takes longer than {most_s} s") from e
    if process.returncode not in (0, 1):  # 1 if there are errors in the programs
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise _NotChecked(f"pyrefly ended with status {process.returncode}: {last}")
    return output
