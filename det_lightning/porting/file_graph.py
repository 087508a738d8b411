"""Which files of a project lead to which others, by importing or starting them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable

from det_lightning.porting.file_port import FilePort

_HOOK = "startup-hook.sh"


class FileGraph:
    """The files of a project, ported one by one."""

    def __init__(self, ports: Iterable[FilePort]) -> None:
        self.ports = {_normal(port.path): port for port in ports}
        self._imported = {
            path: [found for name in port.facts.imports if (found := self._module(port, name)) is not None]
            for path, port in self.ports.items()
        }
        self._started = {path: self._starts_of(port) for path, port in self.ports.items()}

    def imported_by(self, port: FilePort) -> list[FilePort]:
        """Return the files that a file imports, directly or indirectly."""
        return self._reached(port, started=False)

    def reached_by(self, port: FilePort) -> list[FilePort]:
        """Return a file, and those that it imports or starts, directly or indirectly."""
        return [port, *self._reached(port, started=True)]

    def started_by(self, port: FilePort) -> list[FilePort]:
        """Return the files that a file starts as scripts, directly or by what it reaches."""
        started = [path for file in self.reached_by(port) for path in self._started[_normal(file.path)]]
        return [self.ports[path] for path in dict.fromkeys(started)]

    def named_by(self, port: FilePort) -> dict[str, FilePort]:
        """Return the files that commands in a file name, by these names."""
        modules = () if port.path.suffix == ".py" else port.facts.imports
        found = {
            **{name: self._file(port, name) for name in port.facts.starts},
            **{name: self._module(port, name) for name in modules},
        }
        return {name: self.ports[path] for name, path in found.items() if path is not None}

    def missing_classes(self, port: FilePort) -> list[tuple[str, FilePort]]:
        """Return the classes that commands in a file name, and that their modules do not have, with these."""
        missing = []
        for given in port.facts.classes:
            module, _, name = given.partition(":")
            found = self._module(port, module)
            if found is not None and not {name, "*"} & set(self.ports[found].facts.names):
                missing.append((name, self.ports[found]))
        return missing

    def executed_by(self, port: FilePort) -> FilePort | None:
        """Return the file of the project that the command of a configuration begins with, if it does."""
        found = self._file(port, port.facts.executes) if port.facts.executes else None
        return None if found is None else self.ports[found]

    def code_directory(self, port: FilePort) -> pathlib.Path | None:
        """Return the directory that a configuration is to be run with; None if its code is not here."""
        for name in port.facts.imports:
            if found := self._module(port, name):
                # From pkg/module.py to what pkg is in.
                depth = name.count(".") + (found.name == "__init__.py")
                return found.parents[depth]
        for name in port.facts.starts:
            if found := self._file(port, name):
                return found.parents[len(pathlib.PurePath(name).parts) - 1]
        return None

    def _reached(self, port: FilePort, *, started: bool) -> list[FilePort]:
        reached: dict[pathlib.Path, None] = {}
        left = [_normal(port.path)]
        while left:
            path = left.pop(0)
            following = [*self._imported[path], *(self._started[path] if started else [])]
            for found in following:
                if found not in reached and found != _normal(port.path):
                    reached[found] = None
                    left.append(found)
        return [self.ports[path] for path in reached]

    def _starts_of(self, port: FilePort) -> list[pathlib.Path]:
        files = [self._file(port, name) for name in port.facts.starts]
        modules = [self._module(port, name) for name in port.facts.modules]
        started = [path for path in (*files, *modules) if path is not None]
        directory = self.code_directory(port) if port.is_configuration else None
        return started if directory is None or directory / _HOOK not in self.ports else [*started, directory / _HOOK]

    def _module(self, port: FilePort, name: str) -> pathlib.Path | None:
        parts = name.strip(".").split(".") if name.strip(".") else []
        if name.startswith("."):
            levels = len(name) - len(name.lstrip("."))
            return self._module_at(_normal(port.path).parents[levels - 1], parts)
        return self._first(port, lambda base: self._module_at(base, parts))

    def _module_at(self, base: pathlib.Path, parts: list[str]) -> pathlib.Path | None:
        path = base.joinpath(*parts)
        candidates = [path / "__init__.py", *([path.with_suffix(".py")] if parts else [])]
        return next((candidate for candidate in candidates if candidate in self.ports), None)

    def _file(self, port: FilePort, name: str) -> pathlib.Path | None:
        return self._first(port, lambda base: path if (path := _normal(base / name)) in self.ports else None)

    def _first(self, port: FilePort, find: Callable[[pathlib.Path], pathlib.Path | None]) -> pathlib.Path | None:
        """Return what is found from the directory of a file or from one above it.

        For a file that is not Python, the directories right below its own are tried last; a match counts only if
        exactly one of them has it.
        """
        directory = _normal(port.path.parent)
        found = next(filter(None, map(find, [directory, *directory.parents])), None)
        if found is not None or port.path.suffix == ".py":
            return found
        below = {path.parent for path in self.ports if path.parent.parent == directory}
        matches = [match for match in map(find, sorted(below)) if match is not None]
        return matches[0] if len(matches) == 1 else None


def _normal(path: pathlib.Path) -> pathlib.Path:
    """Return an absolute path without dots; links are not followed."""
    return pathlib.Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow them)
