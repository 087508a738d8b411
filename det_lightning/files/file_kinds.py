"""Refuses pipes, devices, sockets and directories in place of files; opening a pipe would wait for its other end."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
# Where a shell puts the pipes that it opens, as for <(command).
_OF_SHELL = ("/dev/fd/", "/dev/std", "/proc/")


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise an OSError unless there is a file at a path; the pipes of a shell count as files."""
    kind = stat.S_IFMT(Path(path).stat().st_mode)
    if kind in _KINDS and not (kind == stat.S_IFIFO and is_of_shell(path)):
        raise OSError(f"{os.fspath(path)} is {_KINDS[kind]}, and not a file")


def is_of_shell(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a stream that is already open, such as ``/dev/stdout``."""
    return os.fspath(path).startswith(_OF_SHELL)


def require_output(path: Path, suffixes: Sequence[str] = ()) -> None:
    """Raise an error unless a file can be written at a path that ends with one of the suffixes, if any are given."""
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"The file of the page must end with {' or '.join(suffixes)}; got {path}.")
    try:
        require_file(path)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise OSError(f"There is no directory {path.parent} for {path.name}.") from None
