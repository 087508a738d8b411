"""Which files of a project start which others, and whether each entry point will run on det_lightning."""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
import shlex
from collections.abc import Callable, Iterable, Iterator

from det_lightning.escaping import escape
from det_lightning.porting.facts import Kind
from det_lightning.porting.file_port import FilePort
from det_lightning.porting.findings import Finding, Need, Premise, Severity
from det_lightning.porting.installed import count_gpus
from det_lightning.startup_hook import STARTUP_HOOK, is_accepted


class FileGraph:
    """The ported files ``ports`` of a project, and the links between them."""

    def __init__(self, ports: Iterable[FilePort]) -> None:
        self.ports = {_normal(port.path): port for port in ports}
        self._imported = {port.path: self._resolve_imports(port) for port in self.ports.values()}
        self._started = {port.path: self._resolve_starts(port) for port in self.ports.values()}

    def find_imports(self, port: FilePort) -> list[FilePort]:
        """Return the files imported by a file, directly or indirectly."""
        return self._walk(port, started=False)

    def find_direct_imports(self, port: FilePort) -> list[FilePort]:
        return self._imported[port.path]

    def find_reached(self, port: FilePort) -> list[FilePort]:
        """Return a file, and all files imported or started by the file, directly or indirectly."""
        return [port, *self._walk(port, started=True)]

    def find_started(self, port: FilePort) -> list[FilePort]:
        """Return the files started as scripts by a file, or by any file it reaches."""
        started = [one for file in self.find_reached(port) for one in self._started[file.path]]
        return list({one.path: one for one in started}.values())

    def find_missing_classes(self, port: FilePort) -> list[tuple[str, FilePort]]:
        """Return each class that a command in a file names but its module lacks, with the module's file."""
        given = [name.partition(":") for name in port.facts.classes]
        found = [(name, self._module(port, module)) for module, _, name in given]
        return [(name, module) for name, module in found if module and not {name, "*"} & set(module.facts.names)]

    def find_executed(self, port: FilePort) -> FilePort | None:
        """Return the file executed directly by the command of a configuration, or None."""
        return self._file(port, port.facts.executes) if port.facts.executes else None

    def find_code_directory(self, port: FilePort) -> pathlib.Path | None:
        """Return the directory to run a configuration with, or None if the project lacks the code."""
        for name in port.facts.imports:
            if found := self._module(port, name):
                # From pkg/module.py to the directory of pkg.
                return _normal(found.path).parents[name.count(".") + (found.path.name == "__init__.py")]
        for name in port.facts.starts:
            if found := self._file(port, name):
                return _normal(found.path).parents[len(pathlib.PurePath(name).parts) - 1]
        return None

    def _walk(self, port: FilePort, *, started: bool) -> list[FilePort]:
        reached: dict[pathlib.Path, FilePort] = {}
        left = [port]
        for file in left:  # grows
            for found in [*self._imported[file.path], *(self._started[file.path] if started else [])]:
                if found.path not in reached and found is not port:
                    reached[found.path] = found
                    left.append(found)
        return list(reached.values())

    def _resolve_imports(self, port: FilePort) -> list[FilePort]:
        found = [self._module(port, name) for name in port.facts.imports]
        return [imported for imported in found if imported is not None]

    def _resolve_starts(self, port: FilePort) -> list[FilePort]:
        found = [self._file(port, name) for name in port.facts.starts]
        found += [self._module(port, name) for name in port.facts.modules]
        if port.is_configuration and (directory := self.find_code_directory(port)):
            found.append(self.ports.get(directory / STARTUP_HOOK))
        return [started for started in found if started is not None]

    def _module(self, port: FilePort, name: str) -> FilePort | None:
        parts = [part for part in name.split(".") if part]
        if name.startswith("."):
            levels = len(name) - len(name.lstrip("."))
            return self._module_at(_normal(port.path).parents[levels - 1], parts)
        return self._first(port, lambda base: self._module_at(base, parts))

    def _module_at(self, base: pathlib.Path, parts: list[str]) -> FilePort | None:
        path = base.joinpath(*parts)
        candidates = [path / "__init__.py", *([path.with_suffix(".py")] if parts else [])]
        return next((self.ports[candidate] for candidate in candidates if candidate in self.ports), None)

    def _file(self, port: FilePort, name: str) -> FilePort | None:
        return self._first(port, lambda base: self.ports.get(_normal(base / name)))

    def _first(self, port: FilePort, find: Callable[[pathlib.Path], FilePort | None]) -> FilePort | None:
        """Return the first match in the directory of a file, the directories above, and ``src`` in each of these.

        For files other than Python, the directories right below are searched last, and only a single match counts.
        """
        directory = _normal(port.path.parent)
        bases = [base / part for base in (directory, *directory.parents) for part in ("", "src")]
        found = next(filter(None, map(find, bases)), None)
        if found is not None or port.path.suffix == ".py":
            return found
        below = {path.parent for path in self.ports if path.parent.parent == directory}
        matches = [match for match in map(find, sorted(below)) if match is not None]
        return matches[0] if len(matches) == 1 else None


def _normal(path: pathlib.Path) -> pathlib.Path:
    """Return an absolute path without dots; links are not followed."""
    return pathlib.Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow links)


_MOST_REASONS = 3


class Outcome(str, enum.Enum):
    """Where an entry point runs after porting."""

    moves = "moves"  #: should run on det_lightning, or ran
    waits = "waits"  #: will, once some lines are changed
    stays = "stays"  #: still needs Determined


@dataclasses.dataclass(frozen=True)
class Reason:
    """A finding that keeps an entry point from running on det_lightning."""

    path: pathlib.Path
    finding: Finding

    def __str__(self) -> str:
        position = f"{self.path}:{self.finding.line}" if self.finding.line else str(self.path)
        return f"{position} ({self.finding.reason})"


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """A configuration, script or notebook that users start."""

    port: FilePort  # the file
    project: pathlib.Path  # the directory of the code
    outcome: Outcome
    command: str  # starts the entry point on det_lightning; empty for notebooks
    reasons: list[Reason]  # the obstacles to running
    to_check: int  # the number of findings to look at, in all files
    files: list[FilePort]  # all files of the entry point, including ``port``
    tried: bool = False  # whether started for a few batches
    error: str = ""  # the error after a failed try

    @property
    def state(self) -> str:
        """The state of the entry point in one or two words."""
        if self.tried:
            return "failed" if self.error else "ran"
        return "should run" if self.outcome is Outcome.moves else self.outcome.value

    @property
    def sentence(self) -> str:
        """A sentence on the future of the entry point, without the entry point's name."""
        how = f"with `{self.command}`" if self.command else "with det_lightning"
        if self.error:
            return f"failed {how}: {self.error}"
        if self.outcome is Outcome.moves:
            found = f"; {self.to_check} finding{'s' if self.to_check > 1 else ''} to look at"
            return f"{self.state} {how}{found if self.to_check else ''}"
        listed = ", ".join(str(reason) for reason in self.reasons[:_MOST_REASONS])
        if (rest := len(self.reasons) - _MOST_REASONS) > 0:
            listed += f", and {rest} more line{'s' if rest > 1 else ''}"
        if self.outcome is Outcome.stays:
            return f"still needs Determined because of {listed}"
        if all(reason.finding.needs_gpu for reason in self.reasons):
            return f"needs a GPU, which this machine lacks, and should run {how} where there is one: {listed}"
        return f"should run {how} once this is changed: {listed}"


def find_entry_points(graph: FileGraph) -> list[EntryPoint]:
    """Return the entry points of a project, sorted by directory."""
    # Files started by a configuration or imported by a script are no entry points.
    within = {
        reached.path
        for port in graph.ports.values()
        for reached in (graph.find_reached(port)[1:] if port.is_configuration else graph.find_imports(port))
        if not reached.is_configuration
    }
    order = {Kind.configuration: 0, Kind.commands: 1, Kind.script: 2, Kind.notebook: 3}
    found = []
    for port in graph.ports.values():
        may_be_started = port.facts.kind in order and port.path.name != STARTUP_HOOK and port.path not in within
        if may_be_started and (port.facts.uses_determined or find_needs(port, Need.file, Need.script)):
            found.append(_entry_point(graph, port))
    return sorted(found, key=lambda entry: (entry.project, order[entry.port.facts.kind], entry.port.path))


def find_needs(port: FilePort, *needs: Need) -> list[Reason]:
    """Return the findings of a file with one of the given needs, as reasons."""
    return [Reason(port.path, finding) for finding in port.findings if finding.needs_determined in needs]


def find_needs_around(graph: FileGraph, port: FilePort) -> list[Reason]:
    """Return the reasons why a file and all files reached by imports or starts need Determined."""
    started = [reason for file in graph.find_started(port) for reason in find_needs(file, Need.script)]
    return started + [reason for file in graph.find_reached(port) for reason in find_needs(file, Need.file)]


def _entry_point(graph: FileGraph, port: FilePort) -> EntryPoint:
    files = graph.find_reached(port)
    needs = [*find_needs(port, Need.script), *find_needs_around(graph, port)]
    others = [
        Reason(file.path, finding)
        for file in files
        for finding in file.findings
        if finding.severity is Severity.problem and finding.needs_determined is Need.nothing
    ]
    directory = graph.find_code_directory(port) if port.is_configuration else None
    if port.is_configuration:
        others += [Reason(path, Finding(0, Severity.problem, why, "")) for path, why in _find_obstacles(graph, port)]
    if not needs and not others and not count_gpus():
        others = [Reason(file.path, finding) for file in files for finding in file.findings if finding.needs_gpu]
    outcome = Outcome.stays if needs else Outcome.waits if others else Outcome.moves
    reasons: dict[tuple[pathlib.Path, int], Reason] = {}  # one per line
    for reason in needs or others:
        reasons.setdefault((reason.path, reason.finding.line), reason)
    checks = sum(finding.severity is Severity.check for file in files for finding in file.findings)
    project = port.path.parent if directory is None else shorten(directory)
    command = _command(port, files, project)
    return EntryPoint(port, project, outcome, command, list(reasons.values()), checks, files)


def _find_obstacles(graph: FileGraph, port: FilePort) -> Iterator[tuple[pathlib.Path, str]]:
    """Yield the files that keep a configuration from running, each with the reason."""
    missing = [*(f"module {name}" for name in port.facts.imports), *(f"file {name}" for name in port.facts.starts)]
    if graph.find_code_directory(port) is None:
        if missing:
            yield port.path, f"there is no {missing[0]} in the directories that were given"
        elif not port.facts.has_entrypoint:
            yield port.path, "it has no entrypoint"
        return
    for name, module in graph.find_missing_classes(port):
        yield port.path, f"there is no class {name} in {shorten(module.path)}"
    script = graph.find_executed(port)
    if script is not None and not os.access(script.path, os.X_OK):
        yield script.path, "it is not executable"


def shorten(directory: pathlib.Path) -> pathlib.Path:
    """Return a directory below the working directory as a relative path, and any other directory unchanged."""
    here = pathlib.Path.cwd()
    return directory.relative_to(here) if directory.is_relative_to(here) else directory


def _command(port: FilePort, files: Iterable[FilePort], project: pathlib.Path) -> str:
    path = shlex.quote(escape(shorten(port.path)))
    if port.is_configuration:
        directory = "" if project == pathlib.Path() else f" {shlex.quote(escape(project))}"
        hooks = [file for file in files if file.path.name == STARTUP_HOOK and not is_accepted(file.before)]
        gpus = max(count_gpus(), 1)
        slots = f" --slots {gpus}" if port.facts.slots > gpus else ""
        return f"det-lightning run {path}{directory}{slots}{' --hook skip' if hooks else ''}"
    if port.facts.kind is Kind.script:
        if any(finding.premise is Premise.by_hand for file in files for finding in file.findings):
            return "det-lightning run CONFIG"
        as_is = any(file.facts.imports_determined for file in files)
        return f"python {'-m det_lightning ' if as_is else ''}{path}"
    return f"sh {path}" if port.facts.kind is Kind.commands and port.path.suffix == ".sh" else ""
