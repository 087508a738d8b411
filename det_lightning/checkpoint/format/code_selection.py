"""Choosing the code of a trial among the files of a directory: what Determined copies, without secrets and results."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import re
import stat
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable

import pathspec

from det_lightning.checkpoint.format import layout

#: What Determined's command line leaves out in addition to the patterns in ``.detignore``.
NEVER_COPIED = (
    "__pycache__/", "*.py[co]", "*$py.class", "terraform*",
    ".git/", ".vscode/", ".idea/", ".mypy_cache/", "/.detignore",
)  # fmt: skip
#: The limit of Determined's platform.
MOST_BYTES = 95 * 1024 * 1024

# Names of files, never of directories or Python files.
_SECRETS = pathspec.GitIgnoreSpec.from_lines((
    ".env", ".env.*", ".netrc", "_netrc", ".pgpass", ".pypirc", ".git-credentials", "credentials*", "kaggle.json",
    "id_*", "!id_*.*", "*.key", "*.pem", "*.p12", "*.pfx", "!*.py",
))  # fmt: skip
# A directory with one of these is an environment, a cache or an unfinished checkpoint.
_MARKERS = {"pyvenv.cfg", "conda-meta", "CACHEDIR.TAG", layout.STAGING_MARK}
# A directory with all of these is an experiment of `det-lightning run`.
_OF_EXPERIMENT = {"events.jsonl", "config.json"}
# A directory with this and a log of TensorBoard is a run's, of Lightning's logger.
_OF_LIGHTNING = "hparams.yaml"
_OF_TENSORBOARD = "events.out.tfevents."
# Characters in names that a storage may change, or a reader refuses.
_ODD_NAME = re.compile(r"[\\\x00-\x1f\x7f\ud800-\udfff]")


class CodeSelection:
    """A walk through the absolute path ``source``, without the directories ``apart``. Links are not followed.

    Attributes:
        chosen: paths to copy, each after the directory around the path; the paths of directories end in a slash.
        imported: the chosen files of imported modules.
        problems: why a path cannot be copied, by path.
        partial_because: why only Python files and the files of imported modules are copied; None if everything is.
    """

    def __init__(self, source: pathlib.Path, with_secrets: bool, apart: Iterable[pathlib.Path]) -> None:
        self.source = source
        self.problems: dict[str, str] = {}
        self.partial_because: str | None = None
        self._with_secrets = with_secrets
        self._apart = _identify(apart)
        self._detignore = pathspec.GitIgnoreSpec.from_lines(self._read_patterns(".detignore"))
        self._ignored = pathspec.GitIgnoreSpec.from_lines([*NEVER_COPIED, *self._read_patterns(".gitignore")])
        folders, files = self._walk()
        self.imported = set(filter(self._may_copy, _find_imported(source)))
        if self.partial_because is None:
            self.chosen = [*folders, *sorted(files | self.imported)]
        else:
            self.chosen = sorted({name for name in files if name.endswith(".py")} | self.imported)

    def _read_patterns(self, name: str) -> list[str]:
        """Return the patterns in a file of ``source``. If unreadable, only Python files are copied."""
        path = self.source / name
        if not os.path.lexists(path):
            return []
        try:
            _, content = read_regular_file(path)
            if content is None:
                raise ValueError("it is not a file")
            lines = content.decode("utf-8-sig").splitlines()
            pathspec.GitIgnoreSpec.from_lines(lines)
        except (OSError, ValueError) as e:  # a ValueError of decoding, or of lines that are no patterns
            self.partial_because = f"{name} should be a list of patterns in UTF-8: {e}"
            return []
        return lines

    def _walk(self) -> tuple[list[str], set[str]]:
        """Return the directories, each with a slash, and the files. Beyond the limit, look at Python files alone."""
        folders: list[str] = []
        files: set[str] = set()
        sizes: Counter[str] = Counter()
        total = 0
        for folder, inner, names in os.walk(self.source, onerror=self._note_error):
            here = "" if folder == str(self.source) else f"{os.path.relpath(folder, self.source)}/"
            inner[:] = [name for name in sorted(inner) if self._look_at(f"{here}{name}/") is not None]
            folders.append(here)
            for name in names:
                path = here + name
                is_beyond = total > MOST_BYTES and not name.endswith(".py")
                if not is_beyond and (status := self._look_at(path)) is not None:
                    files.add(path)
                    total += status.st_size
                    sizes[path.partition("/")[0]] += status.st_size
        if total > MOST_BYTES:
            largest = ", ".join(f"{name} ({size / 1024**2:,.1f} MiB)" for name, size in sizes.most_common(3))
            self.partial_because = f"it holds more than {MOST_BYTES // 1024**2} MiB; the largest are {largest}"
        return folders[1:], files

    def _look_at(self, name: str) -> os.stat_result | None:
        """Return the status of a file or directory to copy, or None; note why what should be copied cannot be."""
        if self._leaves_out(name):
            return None
        path = self.source / name
        try:
            status = path.lstat()
            problem = _find_problem(name, status.st_mode)
        except OSError as e:  # it may have vanished since the directory was listed
            problem = e.strerror or str(e)
        if problem is not None:
            self.problems[name.removesuffix("/")] = problem
            return None
        return None if name.endswith("/") and self._is_apart(path) else status

    def _leaves_out(self, name: str) -> bool:
        by_detignore = self._detignore.check_file(name).include
        if by_detignore is not None:  # a pattern names it, perhaps with a "!"
            return by_detignore
        is_secret = not name.endswith("/") and _SECRETS.match_file(name.rpartition("/")[2])
        return (is_secret and not self._with_secrets) or self._ignored.match_file(name)

    def _is_apart(self, folder: pathlib.Path) -> bool:
        """Return whether a directory is a storage, an environment, a cache, an experiment or a checkpoint."""
        try:
            names = {*os.listdir(folder)}  # noqa: PTH208 (faster)
        except OSError:  # which the walk notes
            return False
        return (
            folder.name == layout.BOOKKEEPING_DIR
            or not self._apart.isdisjoint(_identify([folder]))
            or not _MARKERS.isdisjoint(names)
            or names >= _OF_EXPERIMENT
            or (_OF_LIGHTNING in names and any(name.startswith(_OF_TENSORBOARD) for name in names))
            or (
                not names.isdisjoint({layout.METADATA_FILE, layout.LOAD_DATA_FILE})
                and any(os.path.lexists(folder / name) for name in layout.STATE_FILES)
            )
        )

    def _may_copy(self, name: str) -> bool:
        """Return whether a module's file may be copied, whatever rules other than ``.detignore`` say."""
        parents = [self.source / parent for parent in pathlib.PurePosixPath(name).parents if parent.name]
        return not (self._detignore.match_file(name) or _ODD_NAME.search(name) or any(map(self._is_apart, parents)))

    def _note_error(self, error: OSError) -> None:
        self.problems[os.path.relpath(error.filename, self.source)] = error.strerror or str(error)


def _find_problem(name: str, mode: int) -> str | None:
    """Return why a path with this ``mode`` cannot be copied, or None."""
    if stat.S_ISLNK(mode):
        return "it is a link"
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return "it is neither a file nor a directory"
    return "not every storage can hold its name" if _ODD_NAME.search(name) else None


def read_regular_file(path: pathlib.Path, flags: int = 0) -> tuple[os.stat_result, bytes | None]:
    """Return the status of a file and the content, or None in place of the content if the file is not a regular one.

    The file is opened with further ``flags``, and read up to the size at the start.
    """
    # Opening a FIFO must not wait for a writer.
    flags |= os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return status, None
    with os.fdopen(descriptor, "rb") as file:
        return status, file.read(status.st_size)


_normalize = functools.cache(os.path.normpath)


def _find_imported(directory: pathlib.Path) -> set[str]:
    """Return the paths of loaded modules' files below ``directory``, except Python's own and installed modules."""
    roots = [os.path.abspath(directory), os.path.realpath(directory)]  # noqa: PTH100 (the first keeps links)
    roots += [os.path.realpath(sysconfig.get_path("stdlib")), os.path.realpath(sysconfig.get_path("platstdlib"))]
    here, real, *pythons_own = map(os.path.join, roots, itertools.repeat(""))  # each with a slash at the end
    found = set()
    # Thousands of modules are loaded, and few of them are there: resolving the path of each would be slow.
    for module in list(sys.modules.values()):
        try:
            # getattr() would import a lazy module.
            attributes = object.__getattribute__(module, "__dict__")
        except AttributeError:  # another object in place of a module
            continue
        file = attributes.get("__file__") if isinstance(attributes, dict) else None
        if not isinstance(file, str):
            continue
        path = _normalize(file) if file.startswith(os.sep) else os.path.abspath(file)  # noqa: PTH100
        if not path.startswith((here, real)):
            continue
        relative = pathlib.PurePath(path.removeprefix(here).removeprefix(real))
        if (
            {"site-packages", "dist-packages"}.isdisjoint(relative.parts)
            and pathlib.Path(path).is_file()  # unlike "<stdin>"
            and not os.path.realpath(path).startswith(tuple(pythons_own))
        ):
            found.add(relative.as_posix())
    return found


def _identify(paths: Iterable[str | os.PathLike[str]]) -> set[tuple[int, int]]:
    """Return the device and inode of each existing file or directory."""
    found = set()
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116 (of a string too)
            found.add((status.st_dev, status.st_ino))
    return found
