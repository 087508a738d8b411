"""Copying the code of a trial into its checkpoints."""

from __future__ import annotations

import errno
import logging
import os
import pathlib
import stat
from typing import IO

# Imported here and not at the first checkpoint: CPython loses a Ctrl-C while an optional `from` import fails.
from det_lightning.checkpoint.format.code_rules import CodeRules
from det_lightning.checkpoint.format.code_selection import CodeLimits, CodeScan
from det_lightning.escaping import escape, name_some

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1024 * 1024
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# A FIFO that has taken the place of a file must not make the open wait for a writer.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
# Errors of a file system on which a name is not possible.
_NAME_ERRNOS = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)


class _CannotCopyError(Exception):
    """One file cannot be copied; the message says why."""


class _SecretError(Exception):
    """A file turned out to hold a private key."""


class CodeCopier:
    """Copies the code of one run into each of its checkpoints.

    What :class:`CodeRules` name, virtual environments and checkpoints are left out; but files from which this process
    has imported a module only if ``.detignore`` names them. Files that cannot be copied are named in a warning, once a
    run. ``source`` is by default the working directory when copying; ``apart``, the storage of the checkpoints, is left
    out if it is in there.
    """

    def __init__(
        self,
        source: pathlib.Path | None = None,
        apart: pathlib.Path | None = None,
        with_secrets: bool = False,
        limits: CodeLimits | None = None,
    ) -> None:
        self._source = source or pathlib.Path()
        self._apart = apart
        self._with_secrets = with_secrets
        self._limits = limits
        self._reported: set[str] = set()

    def copy(self, target: pathlib.Path) -> None:
        """Copy the code to the new directory ``target``, with the permissions that the umask allows."""
        target.mkdir()
        try:
            source = pathlib.Path(os.path.abspath(self._source))  # noqa: PTH100 (keeps links)
        except FileNotFoundError:
            logger.warning("No code is copied into checkpoints any more: the working directory has been removed.")
            return
        rules = CodeRules(source, self._with_secrets)
        apart = [target.parent, *([self._apart] if self._apart is not None else [])]
        scan = CodeScan(source, rules, apart, self._limits or CodeLimits())
        for name in [*scan.directories, *scan.files]:
            try:
                if name.endswith("/"):
                    _make_directory(target / name)
                elif name:
                    _copy_file(source / name, target / name, name, rules, name in scan.imported)
            except _CannotCopyError as e:
                scan.problems[name] = str(e)
            except _SecretError:
                scan.secrets.append(name)
        self._report(source, scan)

    def _report(self, source: pathlib.Path, scan: CodeScan) -> None:
        if scan.partial_because is not None and self._is_news("partial"):
            largest = ", ".join(f"{escape(name)} ({size / 1024**2:,.1f} MiB)" for name, size in scan.largest())
            logger.warning(
                "Checkpoints get only a part of the code in %s, its Python sources and the files of imported modules: "
                "%s. The largest of those that were looked at: %s. Name what the trial does not need in a file "
                ".detignore there, with the syntax of .gitignore, or choose another directory with code_dir=.",
                *(escape(source), scan.partial_because, largest or "nothing"),
            )
        for problem in filter(self._is_news, scan.rule_problems):
            logger.warning("While the code is copied into checkpoints: %s.", escape(problem))
        if new := [f"{escape(name)} ({problem})" for name, problem in scan.problems.items() if self._is_news(name)]:
            logger.warning("Not copied from %s into checkpoints: %s.", escape(source), name_some(new))
        if new := [escape(name) for name in scan.secrets if self._is_news(name)]:
            logger.info(
                "Not copied from %s into checkpoints, as they may hold secrets: %s. To copy one write !NAME into a "
                "file .detignore there.",
                *(escape(source), name_some(new)),
            )

    def _is_news(self, text: str) -> bool:
        is_news = text not in self._reported
        self._reported.add(text)
        return is_news


def _copy_file(source: pathlib.Path, target: pathlib.Path, name: str, rules: CodeRules, is_imported: bool) -> None:
    """Copy one file, no more than its size at the start; if it is an imported module's, it may be a link."""
    try:
        descriptor = os.open(source, _READ_FLAGS | (0 if is_imported else _NO_LINK))
    except OSError as e:
        raise _CannotCopyError(_reason(e)) from e
    with os.fdopen(descriptor, "rb") as reader:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _CannotCopyError("it is not a file any more")
        chunk = _read(reader, status.st_size)
        if not is_imported and rules.holds_key(chunk, name):
            raise _SecretError
        _copy_content(reader, status, chunk, target)


def _copy_content(reader: IO[bytes], status: os.stat_result, chunk: bytes, target: pathlib.Path) -> None:
    """Write ``chunk`` and the rest of a file with this status to a new file; remove that if the rest cannot be read."""
    left = status.st_size
    writer = _new_file(target, status.st_mode)
    try:
        with writer:
            while chunk:
                writer.write(chunk)
                left -= len(chunk)
                chunk = _read(reader, left) if left else b""
    except _CannotCopyError:
        target.unlink(missing_ok=True)
        raise


def _read(reader: IO[bytes], count: int) -> bytes:
    try:
        return reader.read(min(count, _CHUNK_BYTES))
    except OSError as e:
        raise _CannotCopyError(_reason(e)) from e


def _new_file(target: pathlib.Path, mode: int) -> IO[bytes]:
    """Create a file and its directory, with the permissions ``mode`` as far as the umask allows them."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(target, flags, stat.S_IMODE(mode) & 0o777 | stat.S_IWUSR | stat.S_IRUSR), "wb")
    except OSError as e:
        if e.errno in _NAME_ERRNOS:
            raise _CannotCopyError(_reason(e)) from e
        raise


def _make_directory(target: pathlib.Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        if e.errno in _NAME_ERRNOS:
            raise _CannotCopyError(_reason(e)) from e
        raise


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
