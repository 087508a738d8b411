"""Which files of a project import or start which others."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable

from det_lightning.porting.file_port import FilePort
from det_lightning.startup_hook import STARTUP_HOOK


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
