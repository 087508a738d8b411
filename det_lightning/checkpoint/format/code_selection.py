"""Finding the files of a directory that belong to the code of a trial, without walking all of a large one."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
import sysconfig
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from det_lightning.checkpoint.format.code_rules import CodeRules, GitIgnores
from det_lightning.checkpoint.format.layout import (
    BOOKKEEPING_DIR,
    CODE_DIR,
    LOAD_DATA_FILE,
    METADATA_FILE,
    STAGING_MARK,
    STATE_FILES,
)

_INSTALLED = {"site-packages", "dist-packages"}


def files_imported_from(directory: pathlib.Path) -> set[str]:
    """Return the files of loaded modules that lie in ``directory``, by their paths from there.

    Those of Python itself and of installed packages, as in a virtual environment there, are left out.
    """
    roots = (os.path.abspath(directory), os.path.realpath(directory))  # noqa: PTH100 (the first keeps links)
    below = tuple(root.rstrip(os.sep) + os.sep for root in roots)
    pythons_own = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    found = set()
    # Thousands of modules are loaded, and few of them lie there: one loop, without a call for each.
    for module in list(sys.modules.values()):
        try:
            # Asking a lazy module in the usual way would import it.
            attributes = object.__getattribute__(module, "__dict__")
        except AttributeError:  # something else that stands for a module
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
# Names that a storage does not give back as they are, or that a reader refuses.
_ODD_NAME = re.compile(r"[\\\x00-\x1f\x7f\ud800-\udfff]")
# A directory that holds one of these is an environment or a cache.
_MARKERS = {"pyvenv.cfg", "conda-meta", "CACHEDIR.TAG", STAGING_MARK}


@dataclasses.dataclass(frozen=True)
class CodeLimits:
    """How much is copied of a directory; beyond that only Python sources and the files of imported modules are.

    Attributes:
        size_bytes: size of all files; Determined's platform takes no more.
        entries: number of files and directories that are looked at.
        scan_s: time for looking at them, which a network drive may need long for.
    """

    size_bytes: int = 95 * 1024 * 1024
    entries: int = 50_000
    scan_s: float = 20.0


@dataclasses.dataclass(frozen=True)
class CodeSelection:
    """What :func:`select_code` found.

    Attributes:
        directories: paths of the directories to make, each after the one that holds it.
        files: paths of the files to copy.
        imported: paths of the files from which modules were imported; they are copied in any case.
        problems: what cannot be copied, and why not, by path.
        rule_problems: what is wrong with the files that say what to leave out, a sentence each.
        secrets: what is left out since secrets are kept under such names.
        partial_because: why only Python sources and the files of imported modules are to be copied, if so.
        largest: sizes in bytes of what lies at the top, as far as it was looked at; the largest first.
    """

    directories: list[str]
    files: list[str]
    imported: set[str]
    problems: dict[str, str]
    rule_problems: list[str]
    secrets: list[str]
    partial_because: str | None
    largest: list[tuple[str, int]]


@dataclasses.dataclass(frozen=True)
class _Folder:
    """A directory that is to be looked into: its path with a slash at the end, and what git ignores in it."""

    name: str
    ignores: GitIgnores


def select_code(
    source: pathlib.Path, rules: CodeRules, apart: Iterable[pathlib.Path] = (), limits: CodeLimits | None = None
) -> CodeSelection:
    """Find what to copy of ``source``; links are not followed.

    Args:
        source: the absolute path of the directory with the code.
        rules: what to leave out by name.
        apart: directories that are left out wherever they lie.
        limits: how much to copy.
    """
    scan = _Scan(source, rules, apart, limits or CodeLimits())
    scan.run()
    return scan.selection()


class _Scan:
    """A walk through a directory, level by level, since what belongs to a script lies near it."""

    def __init__(
        self, source: pathlib.Path, rules: CodeRules, apart: Iterable[pathlib.Path], limits: CodeLimits
    ) -> None:
        self._source = source
        self._rules = rules
        self._limits = limits
        self._apart = {identity for path in apart if (identity := _identity(path)) is not None}
        self._directories: list[str] = []
        self._sizes: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        self._secrets: list[str] = []
        self._rule_problems: list[str] = []
        self._entries = 0
        self._ends_at = time.monotonic() + limits.scan_s
        self._ended_because: str | None = None

    def run(self) -> None:
        folders = deque([_Folder("", GitIgnores.around(self._source, self._rule_problems))])
        while folders and self._ended_because is None:
            folder = folders.popleft()
            entries = list(self._entries_of(folder))
            if folder.name and _is_environment_or_checkpoint(self._source / folder.name, entries):
                continue
            self._directories.append(folder.name)
            names = {entry.name for entry in entries}
            ignores = folder.ignores.entered(f"{self._source}/{folder.name}", names, self._rule_problems)
            folders.extend(self._look_at(_Folder(folder.name, ignores), entries))

    def selection(self) -> CodeSelection:
        imported = {name for name in files_imported_from(self._source) if self._may_be_copied(name)}
        partial_because = self._why_partial()
        chosen = self._sizes if partial_because is None else self._sources_within_limit(imported)
        return CodeSelection(
            directories=self._directories if partial_because is None else [],
            files=[*(name for name in chosen if name not in imported), *sorted(imported)],
            imported=imported,
            problems=self._problems,
            rule_problems=[*self._rules.problems, *self._rule_problems],
            secrets=self._secrets,
            partial_because=partial_because,
            largest=_largest(self._sizes),
        )

    def _why_partial(self) -> str | None:
        if self._ended_because is not None:
            return self._ended_because
        total = sum(self._sizes.values())
        limit = self._limits.size_bytes
        if total > limit:
            return f"the {len(self._sizes):,} files there have {_mib(total)}, and no more than {_mib(limit)} are copied"
        if self._rules.detignore_failed:
            return "nobody knows what to leave out, as its .detignore cannot be read"
        return None

    def _sources_within_limit(self, imported: set[str]) -> list[str]:
        room = self._limits.size_bytes - sum(self._sizes.get(name, 0) for name in imported)
        chosen = []
        for name, size in self._sizes.items():
            if name not in imported and name.endswith(_SOURCE_SUFFIXES) and size <= room:
                room -= size
                chosen.append(name)
        return chosen

    def _entries_of(self, folder: _Folder) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(self._source / folder.name) as entries:
                for entry in entries:
                    self._entries += 1
                    if self._entries > self._limits.entries:
                        self._ended_because = f"it holds more than {self._limits.entries:,} files and directories"
                    elif time.monotonic() > self._ends_at:
                        self._ended_because = f"looking through it took more than {self._limits.scan_s:g} s"
                    if self._ended_because is not None:
                        return
                    yield entry
        except OSError as e:
            self._problems[folder.name or "."] = e.strerror or str(e)

    def _look_at(self, folder: _Folder, entries: list[os.DirEntry[str]]) -> Iterator[_Folder]:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = f"{folder.name}{entry.name}"
            try:
                is_directory = entry.is_dir(follow_symlinks=False)
                # Who names a directory means the link to one too.
                forms = [f"{name}/"] if is_directory else [name, f"{name}/"] if entry.is_symlink() else [name]
                if any(self._leaves_out(form, folder.ignores) for form in forms):
                    continue
                if problem := _why_not(entry, is_directory):
                    self._problems[name] = problem
                elif not is_directory:
                    self._sizes[name] = entry.stat(follow_symlinks=False).st_size
                elif entry.name != BOOKKEEPING_DIR and _identity(entry.path) not in self._apart:
                    yield _Folder(f"{name}/", folder.ignores)
            except OSError as e:  # it may have vanished since the directory was listed
                self._problems[name] = e.strerror or str(e)

    def _leaves_out(self, name: str, ignores: GitIgnores) -> bool:
        if self._rules.excludes(name):
            return True
        if self._rules.includes(name):
            return False
        if self._rules.is_secret(name):
            self._secrets.append(name)
            return True
        return self._rules.is_never_needed(name) or ignores.name(f"{self._source}/{name}")

    def _may_be_copied(self, name: str) -> bool:
        """Return whether a module's file is to be copied: not if it is the user who wants it left out."""
        if self._rules.excludes(name) or _ODD_NAME.search(name):
            return False
        # The working directory itself may be the storage.
        folders = [self._source / parent for parent in pathlib.PurePosixPath(name).parents if parent.name]
        return not any(
            _identity(folder) in self._apart or _holds_environment_or_checkpoint(folder) for folder in folders
        )


def _why_not(entry: os.DirEntry[str], is_directory: bool) -> str | None:
    if entry.is_symlink():
        return "it is a link"
    if not is_directory and not entry.is_file(follow_symlinks=False):
        return "it is neither a file nor a directory"
    if _ODD_NAME.search(entry.name):
        return "not every storage can hold its name"
    return None


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 (of a string too)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_environment_or_checkpoint(folder: pathlib.Path, entries: list[os.DirEntry[str]]) -> bool:
    if any(entry.name in _MARKERS for entry in entries):
        return True
    described = any(entry.name in (METADATA_FILE, LOAD_DATA_FILE) and entry.is_file() for entry in entries)
    return described and any(os.path.lexists(folder / name) for name in (*STATE_FILES, CODE_DIR))


def _holds_environment_or_checkpoint(folder: pathlib.Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return _is_environment_or_checkpoint(folder, list(entries))
    except OSError:  # the module's file cannot be read either
        return False


def _largest(sizes: dict[str, int]) -> list[tuple[str, int]]:
    totals: Counter[str] = Counter()
    for name, size in sizes.items():
        top, slash, _ = name.partition("/")
        totals[top + slash] += size
    return totals.most_common(3)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.1f} MiB".replace(".0 ", " ")
