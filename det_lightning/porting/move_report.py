"""The page on a move: what was done and what is left in each project."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Iterator

from det_lightning.escaping import escape
from det_lightning.files.local_files import write_output
from det_lightning.pages import render_page
from det_lightning.porting.entry_points import EntryPoint, Outcome
from det_lightning.porting.file_port import FilePort
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.project import ProjectPort
from det_lightning.porting.requirements import list_installed
from det_lightning.startup_hook import STARTUP_HOOK

_LEFT = (Severity.problem, Severity.check)
# By the outcome of an entry point: as the report of a conversion marks that of a check.
_MARKS = {"moves": "passed", "waits": "skipped", "stays": "failed"}


@dataclasses.dataclass(frozen=True)
class MovedProject:
    """A section of the page."""

    name: str  # the directory of the project; empty for files outside of all projects
    entry_points: list[EntryPoint]
    files: list[FilePort]  # changed files, and files with findings

    @property
    def changed(self) -> list[FilePort]:
        """The files to change."""
        return [port for port in self.files if port.changed and port.may_be_written]

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


def write_report(file: pathlib.Path, project: ProjectPort, *, written: bool) -> None:
    """Write the page on a move; an existing file is replaced.

    ``written`` says whether the project's files were changed, or only would be. Raises ImportError if jinja2 is not
    installed.
    """
    outcomes = Counter(entry.outcome for entry in project.entry_points)
    page = render_page(
        "det_lightning.porting:move.html.jinja",
        "port",
        {"shown": escape},
        projects=list(_projects(project)),
        total=len(project.entry_points),
        runs="ran" if any(entry.tried for entry in project.entry_points) else "should run",
        counts={outcome.value: outcomes[outcome] for outcome in Outcome},
        marks=_MARKS,
        changed=sum(port.changed and port.may_be_written for port in project.files),
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
