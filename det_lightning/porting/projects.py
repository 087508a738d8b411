"""The files of a project that may have to be ported."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator

from det_lightning.porting.files import FilePort, is_portable, port_file
from det_lightning.porting.findings import Level

__all__ = ["find_files", "port_paths"]

_SKIPPED = {"__pycache__", "build", "dist", "env", "node_modules", "site-packages", "venv"}


def find_files(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Return the files below ``paths`` that the porting tool reads, each once; those that were named in any case.

    Directories of tools (``.git``, ``node_modules``, virtual environments, ...) are left out.

    Raises:
        FileNotFoundError: there is no such path; all missing ones are named.
        ValueError: a file that was named is of no kind that the porting tool reads.
    """
    given = list(paths)
    missing = [str(path) for path in given if not path.exists()]
    if missing:
        raise FileNotFoundError(f"There is no {', no '.join(missing)}.")
    other = [str(path) for path in given if path.is_file() and not is_portable(path)]
    if other:
        raise ValueError(
            f"{', '.join(other)}: not a kind of file that is ported. Those are Python, notebooks, YAML, shell scripts, "
            "Makefiles, Dockerfiles, requirements, pyproject.toml, setup.cfg, tox.ini and Pipfile."
        )
    return list(dict.fromkeys(file for path in given for file in _files_below(path)))


def _files_below(path: pathlib.Path) -> Iterator[pathlib.Path]:
    if path.is_file():
        yield path
        return
    for directory, names, files in os.walk(path):
        names[:] = sorted(name for name in names if not _is_skipped(pathlib.Path(directory, name)))
        for name in sorted(files):
            file = pathlib.Path(directory, name)
            if is_portable(file) and file.is_file():
                yield file


def _is_skipped(directory: pathlib.Path) -> bool:
    name = directory.name
    hidden = name.startswith(".") and name not in (".github", ".circleci")
    return hidden or name in _SKIPPED or name.endswith(".egg-info") or (directory / "pyvenv.cfg").exists()


def port_paths(paths: Iterable[pathlib.Path]) -> list[FilePort]:
    """Port all files below ``paths``, and return those with something to tell; nothing is written.

    Where nothing but hints of the checklist was found the project has nothing to do with Determined, and the list is
    empty.

    Raises:
        FileNotFoundError, ValueError: see :func:`find_files`.
        OSError: a file can not be read.
    """
    ported = [port_file(file) for file in find_files(paths)]
    if not any(_is_of_determined(port) for port in ported):
        return []
    return [port for port in ported if port.changed or port.findings]


def _is_of_determined(port: FilePort) -> bool:
    hints = all(finding.level is Level.check for finding in port.findings)
    return port.changed or not hints or "det_lightning" in port.before
