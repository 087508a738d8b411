"""Copying the code of a trial into its checkpoints, without walking all of a large directory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import pathlib
import re
import stat
import sys
import sysconfig
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping

# Imported here and not at the first checkpoint: CPython loses a Ctrl-C while an optional `from` import fails.
from det_lightning.checkpoint.format.code_rules import (
    CodeRules,
    GitIgnores,
    is_environment_or_result,
    read_regular_file,
)
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.escaping import escape, name_some

logger = logging.getLogger(__name__)

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
# Errors of a file system on which a name is not possible.
_NAME_ERRNOS = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
# Characters in names that a storage may change, or a reader refuses.
_ODD_NAME = re.compile(r"[\\\x00-\x1f\x7f\ud800-\udfff]")
_PRIVATE_KEY = re.compile(rb"\s*(-----BEGIN .*PRIVATE KEY|PuTTY-User-Key-File-)")
_SOURCE_SUFFIXES = (".py", ".pyi")


@dataclasses.dataclass(frozen=True)
class CodeLimits:
    """Limits beyond which only Python sources and the files of imported modules are copied.

    The default of ``size_bytes`` is the limit of Determined's platform. ``entries`` and ``scan_s`` limit how many files
    and directories are looked at, and for how long: a network drive may be slow.
    """

    size_bytes: int = 95 * 1024 * 1024
    entries: int = 50_000
    scan_s: float = 20.0


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
        self._apart = [] if apart is None else [apart]
        self._with_secrets = with_secrets
        self._limits = limits or CodeLimits()
        self._reported: set[str] = set()

    def copy(self, target: pathlib.Path) -> None:
        """Copy the code to the new directory ``target``, with the permissions that the umask allows."""
        target.mkdir()
        try:
            source = pathlib.Path(os.path.abspath(self._source))  # noqa: PTH100 (keeps links)
        except FileNotFoundError:
            logger.warning("Code is no longer copied into checkpoints: the working directory has been removed.")
            return
        rules = CodeRules(source, self._with_secrets)
        scan = _Scan(source, rules, [target.parent, *self._apart], self._limits)
        for name in scan.chosen:
            try:
                if name.endswith("/"):
                    (target / name).mkdir(parents=True, exist_ok=True)
                else:
                    self._copy_file(target, name, scan)
            except OSError as e:
                if e.errno not in _NAME_ERRNOS:
                    raise
                scan.problems[name] = e.strerror or str(e)
        if scan.partial_because or rules.problems or scan.problems or rules.secrets:
            self._report(scan)

    def _copy_file(self, target: pathlib.Path, name: str, scan: _Scan) -> None:
        """Copy one file; if it is an imported module's, it may be a link, and hold anything."""
        is_imported = name in scan.imported
        try:
            status, content = read_regular_file(
                scan.source / name, flags=0 if is_imported else getattr(os, "O_NOFOLLOW", 0)
            )
        except OSError as e:
            scan.problems[name] = e.strerror or str(e)
            return
        if content is None:
            scan.problems[name] = "it is not a file any more"
            return
        holds_key = not is_imported and not self._with_secrets and _PRIVATE_KEY.match(content[:100])
        if holds_key and scan.rules.detignore(name) is not False:
            scan.rules.secrets.append(name)
            return
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(status.st_mode) & 0o777 | stat.S_IWUSR | stat.S_IRUSR
        with os.fdopen(os.open(path, _NEW_FILE, mode), "wb") as file:
            file.write(content)

    def _report(self, scan: _Scan) -> None:
        source = escape(scan.source)
        if scan.partial_because is not None and self._is_news("partial"):
            largest = ", ".join(f"{escape(name)} ({size / 1024**2:,.1f} MiB)" for name, size in scan.largest())
            logger.warning(
                "Checkpoints get only a part of the code in %s, its Python sources and the files of imported modules: "
                "%s. The largest of those that were looked at: %s. Name what the trial does not need in a file "
                ".detignore there, with the syntax of .gitignore, or choose another directory with code_dir=.",
                *(source, scan.partial_because, largest or "nothing"),
            )
        for problem in filter(self._is_news, scan.rules.problems):
            logger.warning("While the code is copied into checkpoints: %s.", escape(problem))
        if new := [f"{escape(name)} ({problem})" for name, problem in scan.problems.items() if self._is_news(name)]:
            logger.warning("Not copied from %s into checkpoints: %s.", source, name_some(new))
        if new := [escape(name) for name in filter(self._is_news, scan.rules.secrets)]:
            logger.info(
                "Not copied from %s into checkpoints, as they may hold secrets: %s. To copy one write !NAME into a "
                "file .detignore there.",
                *(source, name_some(new)),
            )

    def _is_news(self, text: str) -> bool:
        is_news = text not in self._reported
        self._reported.add(text)
        return is_news


class _Scan:
    """A walk through the absolute path ``source``, without the directories ``apart``. Links are not followed.

    Attributes:
        chosen: paths to copy, each after the directory that it is in; those of directories end in a slash.
        imported: those of the files of imported modules, which are always copied.
        problems: why a path cannot be copied, by path.
        partial_because: why only Python sources and the files of imported modules are to be copied, if so.
    """

    def __init__(
        self, source: pathlib.Path, rules: CodeRules, apart: Iterable[pathlib.Path], limits: CodeLimits
    ) -> None:
        self.source = source
        self.rules = rules
        self.problems: dict[str, str] = {}
        self.partial_because: str | None = None
        self._limits = limits
        self._apart = _identities(apart)
        self._sizes: dict[str, int] = {}
        folders = self._walk()
        self.imported = set(filter(self._may_be_copied, _files_imported_from(source)))
        total = sum(self._sizes.values())
        if self.partial_because is None and total > limits.size_bytes:
            sizes = f"{_mib(total)}, and no more than {_mib(limits.size_bytes)} are copied"
            self.partial_because = f"the {len(self._sizes):,} files there have {sizes}"
        elif self.partial_because is None and rules.detignore_failed:
            self.partial_because = "it is not known what to leave out, because its .detignore cannot be read"
        if self.partial_because is None:
            self.chosen = [*folders, *sorted(self._sizes.keys() | self.imported)]
        else:
            self.chosen = sorted(self._sources_within_limit() | self.imported)

    def largest(self) -> list[tuple[str, int]]:
        """Return the largest files and directories at the top, with their sizes in bytes as far as they were seen."""
        totals: Counter[str] = Counter()
        for name, size in self._sizes.items():
            top, slash, _ = name.partition("/")
            totals[top + slash] += size
        return totals.most_common(3)

    def _sources_within_limit(self) -> set[str]:
        room = self._limits.size_bytes - sum(self._sizes.get(name, 0) for name in self.imported)
        chosen = set()
        for name, size in self._sizes.items():
            if name not in self.imported and name.endswith(_SOURCE_SUFFIXES) and size <= room:
                room -= size
                chosen.add(name)
        return chosen

    def _walk(self) -> list[str]:
        """Note the files, level by level, as code is usually near the top; return the directories, with a slash."""
        ends_at = time.monotonic() + self._limits.scan_s
        seen = 0
        folders = []
        pending = deque([("", self.rules.ignores_above())])
        while pending and self.partial_because is None:
            folder, ignores = pending.popleft()
            listed = []
            try:
                with os.scandir(self.source / folder) as found:
                    listed = list(itertools.islice(found, self._limits.entries - seen + 1))
            except OSError as e:
                self.problems[folder or "."] = e.strerror or str(e)
            seen += len(listed)
            if seen > self._limits.entries:
                self.partial_because = f"it holds more than {self._limits.entries:,} files and directories"
            elif time.monotonic() > ends_at:
                self.partial_because = f"looking through it took more than {self._limits.scan_s:g} s"
            entries = {entry.name: entry for entry in listed}
            if not folder or not is_environment_or_result(self.source / folder, entries.keys()):
                folders.append(folder)
                ignores = self.rules.ignores_in(f"{self.source}/{folder}", entries, ignores)
                pending.extend(zip(self._look_at(folder, ignores, entries), itertools.repeat(ignores)))
        return folders[1:]

    def _look_at(self, folder: str, ignores: GitIgnores, entries: Mapping[str, os.DirEntry[str]]) -> list[str]:
        """Note the files and problems among the entries of a directory; return the directories in it."""
        folders = []
        for _, entry in sorted(entries.items()):
            name = f"{folder}{entry.name}"
            try:
                is_directory = entry.is_dir(follow_symlinks=False)
                if self.rules.leaves_out(f"{name}/" if is_directory else name, ignores):
                    continue
                is_link = entry.is_symlink()
                if is_link and self.rules.leaves_out(f"{name}/", ignores):
                    continue  # a rule for a directory also applies to a link to one
                if is_link:
                    self.problems[name] = "it is a link"
                elif not is_directory and not entry.is_file(follow_symlinks=False):
                    self.problems[name] = "it is neither a file nor a directory"
                elif _ODD_NAME.search(entry.name):
                    self.problems[name] = "not every storage can hold its name"
                elif not is_directory:
                    self._sizes[name] = entry.stat(follow_symlinks=False).st_size
                elif entry.name != BOOKKEEPING_DIR and self._apart.isdisjoint(_identities([entry.path])):
                    folders.append(f"{name}/")
            except OSError as e:  # it may have vanished since the directory was listed
                self.problems[name] = e.strerror or str(e)
        return folders

    def _may_be_copied(self, name: str) -> bool:
        """Return whether a module's file may be copied, although rules other than ``.detignore`` name it."""
        if self.rules.detignore(name) or _ODD_NAME.search(name):
            return False
        # The working directory itself may be the storage.
        folders = [self.source / parent for parent in pathlib.PurePosixPath(name).parents if parent.name]
        if not self._apart.isdisjoint(_identities(folders)):
            return False
        for folder in folders:
            with contextlib.suppress(OSError):  # then the module's file cannot be read either
                if is_environment_or_result(folder, {*os.listdir(folder)}):  # noqa: PTH208 (faster)
                    return False
        return True


def _files_imported_from(directory: pathlib.Path) -> set[str]:
    """Return the paths below ``directory`` of the files of loaded modules, except Python's own and installed ones."""
    roots = [os.path.abspath(directory), os.path.realpath(directory)]  # noqa: PTH100 (the first keeps links)
    roots += [os.path.realpath(sysconfig.get_path("stdlib")), os.path.realpath(sysconfig.get_path("platstdlib"))]
    here, real, *pythons_own = map(os.path.join, roots, itertools.repeat(""))  # each with a slash at the end
    found = set()
    # Thousands of modules are loaded, and few of them are there: calling a function for each would be slow.
    for module in list(sys.modules.values()):
        try:
            # getattr() would import a lazy module.
            attributes = object.__getattribute__(module, "__dict__")
        except AttributeError:  # another object in place of a module
            continue
        file = attributes.get("__file__") if isinstance(attributes, dict) else None
        if not isinstance(file, str) or not (path := os.path.abspath(file)).startswith((here, real)):  # noqa: PTH100
            continue
        relative = pathlib.PurePath(path.removeprefix(here).removeprefix(real))
        if (
            {"site-packages", "dist-packages"}.isdisjoint(relative.parts)
            and pathlib.Path(path).is_file()  # unlike "<stdin>"
            and not os.path.realpath(path).startswith(tuple(pythons_own))
        ):
            found.add(relative.as_posix())
    return found


def _identities(paths: Iterable[str | os.PathLike[str]]) -> set[tuple[int, int]]:
    """Return what identifies each file or directory, whatever it is called."""
    found = set()
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116 (of a string too)
            found.add((status.st_dev, status.st_ino))
    return found


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.1f} MiB".replace(".0 ", " ")
