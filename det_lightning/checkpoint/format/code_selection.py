"""Finding the files of a directory that belong to the code of a trial, without walking all of a large one."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
import sys
import sysconfig
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.code_rules import CodeRules, GitIgnores

_INSTALLED = {"site-packages", "dist-packages"}


def files_imported_from(directory: pathlib.Path) -> set[str]:
    """Return the paths below ``directory`` of the files of loaded modules, except Python's own and installed ones."""
    roots = (os.path.abspath(directory), os.path.realpath(directory))  # noqa: PTH100 (the first keeps links)
    below = (os.path.join(roots[0], ""), os.path.join(roots[1], ""))  # noqa: PTH118 (a slash at the end)
    pythons_own = (os.path.realpath(sysconfig.get_path("stdlib")), os.path.realpath(sysconfig.get_path("platstdlib")))
    found = set()
    # Thousands of modules are loaded, and few of them are there: calling a function for each would be slow.
    for module in list(sys.modules.values()):
        try:
            # getattr() would import a lazy module.
            attributes = object.__getattribute__(module, "__dict__")
        except AttributeError:  # another object in place of a module
            continue
        file = attributes.get("__file__") if isinstance(attributes, dict) else None
        if not isinstance(file, str) or not (path := os.path.abspath(file)).startswith(below):  # noqa: PTH100
            continue
        relative = _path_below(roots, path)
        if (
            relative is not None
            and not _INSTALLED & {*relative.parts}
            and pathlib.Path(path).is_file()  # unlike "<stdin>"
            and _path_below(pythons_own, os.path.realpath(path)) is None
        ):
            found.add(relative.as_posix())
    return found


def _path_below(roots: Sequence[str], file: str) -> pathlib.PurePath | None:
    for root in roots:
        if file.startswith(root.rstrip(os.sep) + os.sep):
            return pathlib.PurePath(os.path.relpath(file, root))
    return None


_SOURCE_SUFFIXES = (".py", ".pyi")
# Characters in names that a storage may change, or a reader refuses.
_ODD_NAME = re.compile(r"[\\\x00-\x1f\x7f\ud800-\udfff]")
# A directory with one of these is an environment or a cache.
_MARKERS = {"pyvenv.cfg", "conda-meta", "CACHEDIR.TAG", layout.STAGING_MARK}
# A directory with all of these is an experiment of `det-lightning run`.
_OF_EXPERIMENT = {"events.jsonl", "config.json"}


@dataclasses.dataclass(frozen=True)
class CodeLimits:
    """Limits beyond which only Python sources and the files of imported modules are copied.

    The default of ``size_bytes`` is the limit of Determined's platform. ``entries`` and ``scan_s`` limit how many files
    and directories are looked at, and for how long: a network drive may be slow.
    """

    size_bytes: int = 95 * 1024 * 1024
    entries: int = 50_000
    scan_s: float = 20.0


class CodeScan:
    """A walk through the absolute path ``source``, level by level, since a script's code is usually near the top.

    The directories ``apart`` are left out, and links are not followed.

    Attributes:
        directories: paths of the directories to make, with a slash at the end, each after its parent.
        files: paths of the files to copy.
        imported: paths of the files of imported modules, which are always copied.
        problems: why a path cannot be copied, by path.
        rule_problems: what is wrong with the files of rules, one sentence each.
        secrets: paths that are left out because their names suggest secrets.
        partial_because: why only Python sources and the files of imported modules are to be copied, if so.
    """

    def __init__(
        self, source: pathlib.Path, rules: CodeRules, apart: Iterable[pathlib.Path], limits: CodeLimits
    ) -> None:
        self._source = source
        self._rules = rules
        self._limits = limits
        self._apart = {identity for path in apart if (identity := _identity(path)) is not None}
        self._sizes: dict[str, int] = {}
        self._entries = 0
        self._ends_at = time.monotonic() + limits.scan_s
        self.directories: list[str] = []
        self.problems: dict[str, str] = {}
        self.rule_problems = [*rules.problems]
        self.secrets: list[str] = []
        self.partial_because: str | None = None
        self._walk()
        self.imported = set(filter(self._may_be_copied, files_imported_from(source)))
        self.partial_because = self.partial_because or self._why_partial()
        if self.partial_because is None:
            self.files = sorted({*self._sizes, *self.imported})
        else:
            self.directories = []
            self.files = sorted(self._sources_within_limit() | self.imported)

    def _walk(self) -> None:
        folders = deque([("", GitIgnores.around(self._source, self.rule_problems))])
        while folders and self.partial_because is None:
            folder, ignores = folders.popleft()
            entries = self._entries_of(folder)
            if folder and _is_environment_or_result(self._source / folder, entries):
                continue
            self.directories.append(folder)
            inner = ignores.entered(f"{self._source}/{folder}", entries, self.rule_problems)
            folders.extend(zip(self._look_at(folder, inner, entries), itertools.repeat(inner)))

    def largest(self) -> list[tuple[str, int]]:
        """Return the largest files and directories at the top, with their sizes in bytes as far as they were seen."""
        totals: Counter[str] = Counter()
        for name, size in self._sizes.items():
            top, slash, _ = name.partition("/")
            totals[top + slash] += size
        return totals.most_common(3)

    def _why_partial(self) -> str | None:
        total = sum(self._sizes.values())
        limit = self._limits.size_bytes
        if total > limit:
            return f"the {len(self._sizes):,} files there have {_mib(total)}, and no more than {_mib(limit)} are copied"
        if self._rules.detignore_failed:
            return "it is not known what to leave out, because its .detignore cannot be read"
        return None

    def _sources_within_limit(self) -> set[str]:
        room = self._limits.size_bytes - sum(self._sizes.get(name, 0) for name in self.imported)
        chosen = set()
        for name, size in self._sizes.items():
            if name not in self.imported and name.endswith(_SOURCE_SUFFIXES) and size <= room:
                room -= size
                chosen.add(name)
        return chosen

    def _entries_of(self, folder: str) -> dict[str, os.DirEntry[str]]:
        found: dict[str, os.DirEntry[str]] = {}
        try:
            with os.scandir(self._source / folder) as entries:
                for entry in itertools.takewhile(self._is_within_limits, entries):
                    found[entry.name] = entry
        except OSError as e:
            self.problems[folder or "."] = e.strerror or str(e)
        return found

    def _is_within_limits(self, _entry: os.DirEntry[str]) -> bool:
        """Count one more file or directory; return whether the limits allow looking at it."""
        self._entries += 1
        if self._entries > self._limits.entries:
            self.partial_because = f"it holds more than {self._limits.entries:,} files and directories"
        elif time.monotonic() > self._ends_at:
            self.partial_because = f"looking through it took more than {self._limits.scan_s:g} s"
        return self.partial_because is None

    def _look_at(self, folder: str, ignores: GitIgnores, entries: Mapping[str, os.DirEntry[str]]) -> list[str]:
        """Note the files and problems among the entries of a directory; return the directories in it."""
        folders = []
        for _, entry in sorted(entries.items()):
            name = f"{folder}{entry.name}"
            try:
                is_directory = entry.is_dir(follow_symlinks=False)
                is_link = entry.is_symlink()
                if self._rules.leaves_out(f"{name}/" if is_directory else name, ignores, self.secrets):
                    continue
                # A rule for a directory also applies to a link to one.
                if is_link and self._rules.leaves_out(f"{name}/", ignores, self.secrets):
                    continue
                if is_link:
                    self.problems[name] = "it is a link"
                elif not is_directory and not entry.is_file(follow_symlinks=False):
                    self.problems[name] = "it is neither a file nor a directory"
                elif _ODD_NAME.search(entry.name):
                    self.problems[name] = "not every storage can hold its name"
                elif not is_directory:
                    self._sizes[name] = entry.stat(follow_symlinks=False).st_size
                elif entry.name != layout.BOOKKEEPING_DIR and _identity(entry.path) not in self._apart:
                    folders.append(f"{name}/")
            except OSError as e:  # it may have vanished since the directory was listed
                self.problems[name] = e.strerror or str(e)
        return folders

    def _may_be_copied(self, name: str) -> bool:
        """Return whether a module's file may be copied, although rules other than ``.detignore`` name it."""
        if self._rules.detignore(name) or _ODD_NAME.search(name):
            return False
        # The working directory itself may be the storage.
        folders = [self._source / parent for parent in pathlib.PurePosixPath(name).parents if parent.name]
        return not any(_identity(folder) in self._apart or _holds_environment_or_result(folder) for folder in folders)


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 (of a string too)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_environment_or_result(folder: pathlib.Path, entries: Mapping[str, os.DirEntry[str]]) -> bool:
    if not _MARKERS.isdisjoint(entries) or entries.keys() >= _OF_EXPERIMENT:
        return True
    descriptions = (layout.METADATA_FILE, layout.LOAD_DATA_FILE)
    described = any(name in entries and entries[name].is_file() for name in descriptions)
    return described and any(os.path.lexists(folder / name) for name in (*layout.STATE_FILES, layout.CODE_DIR))


def _holds_environment_or_result(folder: pathlib.Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return _is_environment_or_result(folder, {entry.name: entry for entry in entries})
    except OSError:  # the module's file cannot be read either
        return False


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.1f} MiB".replace(".0 ", " ")
