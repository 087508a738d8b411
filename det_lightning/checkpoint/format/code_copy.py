"""Copies a trial's code into checkpoints: what Determined copies, without secrets and results."""

from __future__ import annotations

import errno
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
from typing import Any

import pathspec

from det_lightning.arguments import wrong_argument
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.layout import describe_content
from det_lightning.escaping import escape, get_logger, name_some

logger = get_logger(__name__)

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
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
# Errors of a file system on which a name is not possible.
_NAME_ERRNOS = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)


class CodeCopier:
    """Copies the code of a run into each checkpoint.

    A warning names the files that cannot be copied, once a run. ``source`` defaults to the working directory at the
    time of copying.

    ``descriptions`` are the sizes and checksums of the files of the latest copy, by the paths in the manifest.
    """

    def __init__(self, source: str | os.PathLike[str] | None = None, with_secrets: bool = False) -> None:
        self.descriptions: dict[str, dict[str, Any]] = {}
        self._source = pathlib.Path() if source is None else pathlib.Path(source)
        self._with_secrets = with_secrets
        self._reported: set[str] = set()

    def copy(self, target: pathlib.Path, storage: pathlib.Path | None = None) -> None:
        """Copy the code to the new directory ``target``, with the permissions that the umask allows.

        ``storage``, the directory of the checkpoints, is left out if the code directory contains the storage.
        """
        target.mkdir()
        self.descriptions = {}
        try:
            source = pathlib.Path(os.path.abspath(self._source))  # noqa: PTH100 (keeps links)
        except FileNotFoundError:
            logger.warning("Code is no longer copied into checkpoints: the working directory has been removed.")
            return
        selection = _CodeSelection(source, self._with_secrets, [target.parent, *([] if storage is None else [storage])])
        for name in selection.chosen:
            try:
                if name.endswith("/"):
                    (target / name).mkdir(parents=True, exist_ok=True)
                else:
                    self._copy_file(target / name, name, selection)
            except OSError as e:
                if e.errno not in _NAME_ERRNOS:
                    raise
                selection.problems[name] = e.strerror or str(e)
        if selection.partial_because or selection.problems:
            self._report(selection)

    def _copy_file(self, path: pathlib.Path, name: str, selection: _CodeSelection) -> None:
        source = selection.source / name
        try:
            mode = stat.S_IMODE(source.stat().st_mode) & 0o777 | stat.S_IWUSR | stat.S_IRUSR
            content = source.read_bytes()
        except OSError as e:
            selection.problems[name] = e.strerror or str(e)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, _NEW_FILE, mode), "wb") as file:
            file.write(content)
        self.descriptions[f"{layout.CODE_DIR}/{name}"] = describe_content(content)

    def _report(self, selection: _CodeSelection) -> None:
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


class _CodeSelection:
    """A walk through the absolute path ``source``, without the directories ``apart``. Links are not followed.

    Attributes:
        chosen: paths to copy, each after the directory around the path; the paths of directories end in a slash.
        problems: why a path cannot be copied, by path.
        partial_because: why only Python files and the files of imported modules are copied; None if everything is.
    """

    def __init__(self, source: pathlib.Path, with_secrets: bool, apart: Iterable[pathlib.Path]) -> None:
        self.source = source
        self.problems: dict[str, str] = {}
        self.partial_because: str | None = None
        self._with_secrets = with_secrets
        self._apart = {os.path.realpath(path) for path in apart}
        self._detignore = pathspec.GitIgnoreSpec.from_lines(self._read_patterns(".detignore"))
        self._ignored = pathspec.GitIgnoreSpec.from_lines([*NEVER_COPIED, *self._read_patterns(".gitignore")])
        folders, files = self._walk()
        imported = set(filter(self._may_copy, _find_imported(source)))
        if self.partial_because is None:
            self.chosen = [*folders, *sorted(files | imported)]
        else:
            self.chosen = sorted({name for name in files if name.endswith(".py")} | imported)

    def _read_patterns(self, name: str) -> list[str]:
        """Return the patterns in a file of ``source``. If unreadable, only Python files are copied."""
        path = self.source / name
        if not os.path.lexists(path):
            return []
        try:
            if not path.is_file():
                raise ValueError("it is not a file")
            lines = path.read_text("utf-8-sig").splitlines()
            pathspec.GitIgnoreSpec.from_lines(lines)
        except (OSError, ValueError) as e:  # a ValueError of decoding, or of lines that are no patterns
            self.partial_because = f"{name} should be a list of patterns in UTF-8: {e}"
            return []
        return lines

    def _walk(self) -> tuple[list[str], set[str]]:
        """Return the directories, each with a slash, and the files; beyond the limit, Python files only."""
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
        """Return the status of a file or directory to copy, or None; note why one that should be copied cannot be."""
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
            or os.path.realpath(folder) in self._apart
            or not _MARKERS.isdisjoint(names)
            or names >= _OF_EXPERIMENT
            or (_OF_LIGHTNING in names and any(name.startswith(_OF_TENSORBOARD) for name in names))
            or (
                not names.isdisjoint({layout.METADATA_FILE, layout.LOAD_DATA_FILE})
                and any(os.path.lexists(folder / name) for name in layout.STATE_FILES)
            )
        )

    def _may_copy(self, name: str) -> bool:
        """Return whether a module's file may be copied, by ``.detignore`` alone."""
        parents = [self.source / parent for parent in pathlib.PurePosixPath(name).parents if parent.name]
        return not (self._detignore.match_file(name) or _ODD_NAME.search(name) or any(map(self._is_apart, parents)))

    def _note_error(self, error: OSError) -> None:
        self.problems[os.path.relpath(error.filename, self.source)] = error.strerror or str(error)


def _find_problem(name: str, mode: int) -> str | None:
    """Return why a path with this ``mode`` cannot be copied; None if it can."""
    if stat.S_ISLNK(mode):
        return "it is a link"
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return "it is neither a file nor a directory"
    return "not every storage can hold its name" if _ODD_NAME.search(name) else None


_normalize = functools.cache(os.path.normpath)


def _find_imported(directory: pathlib.Path) -> set[str]:
    """Return the files of loaded modules below ``directory``, except Python's own and installed ones."""
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
