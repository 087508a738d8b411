"""The report of a move: what was done and what is left in each project, and the results of checks."""

from __future__ import annotations

import dataclasses
import operator
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator

from det_lightning.escaping import escape
from det_lightning.files.file_kinds import require_file
from det_lightning.files.local_files import write_output
from det_lightning.pages import render_page
from det_lightning.porting.entry_points import EntryPoint, Outcome
from det_lightning.porting.file_port import FilePort
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.project import ProjectPort
from det_lightning.porting.requirements import list_installed
from det_lightning.startup_hook import STARTUP_HOOK

FORMATS = (".html", ".md")
_LEFT = (Severity.problem, Severity.check)
# By the outcome of an entry point: as the report of a conversion marks that of a check, and what is shown.
_MARKS = {"moves": "passed", "waits": "skipped", "stays": "failed"}


@dataclasses.dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check of ``pytest --trial``, from a JUnit file."""

    trial: str
    name: str  # of the check
    outcome: str  # passed, failed, error or skipped
    message: str  # the reason for a failure, in one line


@dataclasses.dataclass(frozen=True)
class MovedProject:
    """A section of the report."""

    name: str  # the directory of the project; empty for files outside of all projects
    entry_points: list[EntryPoint]
    files: list[FilePort]  # changed files, and files with findings

    @property
    def changed(self) -> list[tuple[FilePort, int]]:
        """The files to change, each with the number of changed lines."""
        return [(port, _count_changed(port)) for port in self.files if port.changed and port.may_be_written]

    @property
    def installed(self) -> list[str]:
        """The packages that start-up hooks install, as lines of a requirements file."""
        files = {file.path: file for entry in self.entry_points for file in entry.files}
        hooks = [file.after for path, file in files.items() if path.name == STARTUP_HOOK]
        return list(dict.fromkeys(line for hook in hooks for line in list_installed(hook)))

    @property
    def left(self) -> list[tuple[FilePort, Finding]]:
        """The findings left to the user, problems first."""
        found = [(port, finding) for port in self.files for finding in port.findings if finding.severity in _LEFT]
        return sorted(found, key=lambda item: _LEFT.index(item[1].severity))


def read_checks(file: pathlib.Path) -> list[CheckOutcome]:
    """Return the checks in a file of ``pytest --junitxml``; raise ValueError for any other file."""
    require_file(file)
    try:
        cases = list(ElementTree.parse(file).iter("testcase"))
    except (ElementTree.ParseError, LookupError, ValueError) as e:  # also of an unknown encoding
        raise ValueError(f"{file} is not a file that pytest --junitxml writes: {e}.") from e
    return [CheckOutcome(case.get("classname", ""), case.get("name", ""), *_outcome(case)) for case in cases]


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for tag, outcome in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            return outcome, " ".join(found.get("message", "").split())
    return "passed", ""


def write_report(file: pathlib.Path, project: ProjectPort, checks: Iterable[CheckOutcome], *, written: bool) -> None:
    """Write the report of a move as HTML or Markdown, by the end of the file's name; an existing file is replaced.

    ``written`` says whether the project's files were changed, or only would be. Raises ImportError if jinja2 is not
    installed.
    """
    outcomes = Counter(entry.outcome for entry in project.entry_points)
    page = render_page(
        f"det_lightning.porting:move{file.suffix}.jinja",
        "port",
        {"cell": _markdown_cell, "shown": escape},
        projects=list(_projects(project)),
        total=len(project.entry_points),
        runs="ran" if any(entry.tried for entry in project.entry_points) else "should run",
        counts={outcome.value: outcomes[outcome] for outcome in Outcome},
        marks=_MARKS,
        changed=sum(port.changed and port.may_be_written for port in project.files),
        checks=list(checks),
        written=written,
    )
    write_output(file, page)


def _projects(project: ProjectPort) -> Iterator[MovedProject]:
    by_directory: dict[pathlib.Path, list[EntryPoint]] = {}
    for entry in project.entry_points:
        by_directory.setdefault(entry.project, []).append(entry)
    files: dict[pathlib.Path | None, list[FilePort]] = {}
    for port in project.files:
        around = [directory for directory in by_directory if port.path.absolute().is_relative_to(directory.absolute())]
        nearest = max(around, key=lambda directory: len(directory.absolute().parts), default=None)
        files.setdefault(nearest, []).append(port)
    for directory, entries in by_directory.items():
        yield MovedProject(str(directory), entries, files.get(directory, []))
    if None in files:
        yield MovedProject("", [], files[None])


def _count_changed(port: FilePort) -> int:
    before, after = (text.splitlines(keepends=True) for text in (port.before, port.after))
    gone = Counter(before)
    new = Counter(after)
    # Lines in another order count by place. difflib would take many seconds for a large notebook.
    return max((gone - new).total(), (new - gone).total()) or sum(map(operator.ne, before, after))


def _markdown_cell(text: object) -> str:
    """Return text for a table cell, without Markdown or HTML."""
    return re.sub(r"([\\|*\[\]<>])", r"\\\1", escape(text))
