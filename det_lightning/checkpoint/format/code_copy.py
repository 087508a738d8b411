"""Copying the code of a trial into checkpoints: each file once a run, as long as the file does not change."""

from __future__ import annotations

import dataclasses
import errno
import operator
import os
import pathlib
import stat
import time
from typing import Any

from det_lightning.arguments import wrong_argument

# Imported here and not at the first checkpoint: CPython loses a Ctrl-C while an optional `from` import fails.
from det_lightning.checkpoint.format.code_selection import CodeSelection, read_regular_file
from det_lightning.checkpoint.format.layout import CODE_DIR
from det_lightning.checkpoint.format.manifest import describe_content
from det_lightning.escaping import escape, get_logger, name_some

logger = get_logger(__name__)

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
# Errors of a file system on which a name is not possible.
_NAME_ERRNOS = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
# What changes with the content or the permissions of a file; and with the content of a copy, whatever links to it.
_SOURCE_STATE = operator.attrgetter("st_dev", "st_ino", "st_mode", "st_size", "st_mtime_ns", "st_ctime_ns")
_COPY_STATE = operator.attrgetter("st_size", "st_mtime_ns")
# A file that was changed so shortly before it was copied may have changed again within one tick of the clock.
_TICK_NS = 2 * 10**9


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A file of the latest copy. Equal states show that neither the source nor the copy has changed.

    ``source_state`` is None if the source had just been written.
    """

    path: pathlib.Path
    source_state: tuple[int, ...] | None
    state: tuple[int, ...]
    description: dict[str, Any]

    def link(self, path: pathlib.Path) -> _Copy | None:
        """Make ``path`` a link to this copy; return None if the copy has changed or vanished, or if linking fails."""
        try:
            if _COPY_STATE(self.path.stat()) != self.state:
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(self.path, path)
        except OSError:
            return None  # and the source is copied, which may raise
        return dataclasses.replace(self, path=path)


class CodeCopier:
    """Copies the code of a run into each checkpoint; an unchanged file is a link to the first copy.

    :class:`CodeSelection` chooses the files. A warning names the files that cannot be copied, once a run. ``source``
    defaults to the working directory at the time of copying.

    ``descriptions`` are the sizes and checksums of the files of the latest copy, by the paths in the manifest.
    ``latest`` is the storage and the id of the checkpoint with the latest copy, once complete, and ``previous`` the
    same for the copy before.
    """

    def __init__(self, source: str | os.PathLike[str] | None = None, with_secrets: bool = False) -> None:
        self.descriptions: dict[str, dict[str, Any]] = {}
        self.latest: tuple[object, str] | None = None
        self.previous: tuple[object, str] | None = None
        self._source = pathlib.Path() if source is None else pathlib.Path(source)
        self._with_secrets = with_secrets
        self._reported: set[str] = set()
        self._copies: dict[str, _Copy] = {}
        self._copies_before: dict[str, _Copy] = {}

    def copy(self, target: pathlib.Path, storage: pathlib.Path | None = None) -> None:
        """Copy the code to the new directory ``target``, with the permissions that the umask allows.

        ``storage``, the directory of the checkpoints, is left out if the code directory contains the storage.
        """
        self.previous = self.latest
        self.latest = None
        target.mkdir()
        self._copies_before = self._copies
        self._copies = {}
        self.descriptions = {}
        try:
            source = pathlib.Path(os.path.abspath(self._source))  # noqa: PTH100 (keeps links)
        except FileNotFoundError:
            logger.warning("Code is no longer copied into checkpoints: the working directory has been removed.")
            return
        selection = CodeSelection(source, self._with_secrets, [target.parent, *([] if storage is None else [storage])])
        for name in selection.chosen:
            try:
                if name.endswith("/"):
                    (target / name).mkdir(parents=True, exist_ok=True)
                elif (copy := self._copy_file(target / name, name, selection)) is not None:
                    self.descriptions[f"{CODE_DIR}/{name}"] = copy.description
                    self._copies[name] = copy
            except OSError as e:
                if e.errno not in _NAME_ERRNOS:
                    raise
                selection.problems[name] = e.strerror or str(e)
        if selection.partial_because or selection.problems:
            self._report(selection)

    def find_unchanged(self) -> set[str]:
        """Return the paths, as in the manifest, of the files that have not changed since the copy before."""
        both = self._copies.keys() & self._copies_before.keys()
        return {
            f"{CODE_DIR}/{name}"
            for name in both
            if self._copies[name].source_state == self._copies_before[name].source_state is not None
        }

    def _copy_file(self, path: pathlib.Path, name: str, selection: CodeSelection) -> _Copy | None:
        """Copy a file to ``path``; the file of an imported module may be a link, and hold anything."""
        is_imported = name in selection.imported
        source = selection.source / name
        before = self._copies_before.get(name)
        try:
            if before is not None and before.source_state == _SOURCE_STATE(source.stat(follow_symlinks=is_imported)):
                linked = before.link(path)
                if linked is not None:
                    return linked
            status, content = read_regular_file(source, flags=0 if is_imported else getattr(os, "O_NOFOLLOW", 0))
        except OSError as e:
            selection.problems[name] = e.strerror or str(e)
            return None
        if content is None:
            selection.problems[name] = "it is not a file any more"
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(status.st_mode) & 0o777 | stat.S_IWUSR | stat.S_IRUSR
        with os.fdopen(os.open(path, _NEW_FILE, mode), "wb") as file:
            file.write(content)
        is_settled = max(status.st_ctime_ns, status.st_mtime_ns) < time.time_ns() - _TICK_NS
        source_state = _SOURCE_STATE(status) if is_settled else None
        return _Copy(path, source_state, _COPY_STATE(path.stat()), describe_content(content))

    def _report(self, selection: CodeSelection) -> None:
        source = escape(selection.source)
        if selection.partial_because is not None and self._is_news("partial"):
            logger.warning(
                "Checkpoints get only Python files and imported modules of %s: %s. List files that the trial does not "
                "need in a .detignore there, with the syntax of .gitignore, or pass another directory: "
                "DeterminedCheckpoint(code_dir=...).",
                *(source, escape(selection.partial_because)),
            )
        if new := [
            f"{escape(name)} ({problem})" for name, problem in selection.problems.items() if self._is_news(name)
        ]:
            logger.warning("Not copied from %s into checkpoints: %s.", source, name_some(new))

    def _is_news(self, text: str) -> bool:
        is_news = text not in self._reported
        self._reported.add(text)
        return is_news


def require_code_directory(owner: str, code_dir: str | os.PathLike[str] | None) -> None:
    """Raise a NotADirectoryError unless the ``code_dir`` of an ``owner`` is a directory or None."""
    if code_dir is not None and not pathlib.Path(code_dir).is_dir():
        raise NotADirectoryError(wrong_argument(f"{owner}(code_dir=...)", "the path of a directory", code_dir))
