"""Choosing the code of a trial among the files of a directory: rules for names, limits, imported modules."""

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
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set

import pathspec

from det_lightning.checkpoint.format import layout

_NEVER_NEEDED = """
.git .hg/ .svn/ .detignore .idea/ .vscode/
__pycache__/ *.py[co] *$py.class .cache/ .*_cache/ .hypothesis/ .ipynb_checkpoints/ .nox/ .tox/ .eggs/ node_modules/
lightning_logs/ mlruns/ runs/ wandb/
core core.[0-9]* vgcore.* !core/
.terraform* terraform terraform_data terraform.tfstate* terraform.tfvars*
/shared_fs
"""

_SECRETS = """
.env .env.* *.env .envrc !.env.example !.env.sample !.env.template !.env/ !*.env/
.netrc _netrc .authinfo* .htpasswd .pgpass .my.cnf .rhosts .*_history .Xauthority .ICEauthority
.aws/ .azure/ .boto .s3cfg .gcloud/ **/.config/gcloud/ .oci/ .kube/ **/.docker/config.json .vault-token
.databrickscfg .huggingface/ .kaggle/ kaggle.json **/.streamlit/secrets.toml
.git-credentials .npmrc .pypirc .gnupg/ .password-store/ .pki/ .ssh/
id_rsa id_dsa id_ecdsa id_ecdsa_sk id_ed25519 id_ed25519_sk
*.jks *.kdbx *.key *.keystore *.keytab *.p12 *.pem *.pfx *.pkcs12 *.ppk
client_secret*.json credentials.json application_default_credentials.json *service[-_]account*.json
.secrets secrets.json secrets.toml secrets.yaml secrets.yml
"""

# A directory with one of these is an environment or a cache.
_MARKERS = {"pyvenv.cfg", "conda-meta", "CACHEDIR.TAG", layout.STAGING_MARK}
# A directory with all of these is an experiment of `det-lightning run`.
_OF_EXPERIMENT = {"events.jsonl", "config.json"}
# Characters in names that a storage may change, or a reader refuses.
_ODD_NAME = re.compile(r"[\\\x00-\x1f\x7f\ud800-\udfff]")
_SOURCE_SUFFIXES = (".py", ".pyi")


# Beyond these a copy holds only Python sources and the files of imported modules: the size, which is the limit of
# Determined's platform, and the number of files and directories that are looked at.
_MAX_BYTES = 95 * 1024 * 1024
_MAX_ENTRIES = 50_000


class CodeRules:
    """Rules for names below the absolute path ``source`` that a copy of code leaves out.

    ``.detignore`` comes first: a pattern leaves out a path, or with a ``!`` keeps the path. After that secrets, paths
    that ``.gitignore`` names, and files that no trial needs are left out. Both files count in ``source`` only.

    Attributes:
        problems: mistakes in the two files, one sentence each.
        detignore_failed: the rules of ``.detignore`` are unknown.
        secrets: paths left out because the names suggest secrets.
    """

    def __init__(self, source: pathlib.Path, with_secrets: bool) -> None:
        self.problems: list[str] = []
        self.secrets: list[str] = []
        self._with_secrets = with_secrets
        detignore = self._read(source / ".detignore")
        self.detignore_failed = detignore is None
        self._detignore = detignore or _compile("")
        self._gitignore = self._read(source / ".gitignore") or _compile("")

    def detignore(self, name: str) -> bool | None:
        """Return True if ``.detignore`` names a relative path, False if a pattern with ``!`` does, otherwise None."""
        return self._detignore.check_file(name).include

    def leaves_out(self, name: str) -> bool:
        """Return whether a relative path is left out; the path of a directory ends in a slash."""
        by_detignore = self._detignore.check_file(name).include
        if by_detignore is not None:
            return by_detignore
        if not self._with_secrets and _compile(_SECRETS).match_file(name):
            self.secrets.append(name)
            return True
        return _compile(_NEVER_NEEDED).match_file(name) or self._gitignore.match_file(name)

    def _read(self, path: pathlib.Path) -> pathspec.GitIgnoreSpec | None:
        """Read a file with the syntax of ``.gitignore``; after a failure note a problem and return None."""
        if not os.path.lexists(path):
            return _compile("")
        try:
            _, content = read_regular_file(path)
            if content is not None:
                return pathspec.GitIgnoreSpec.from_lines(content.decode("utf-8-sig").splitlines())
            self.problems.append(f"{path} is not a file")
        except OSError as e:
            self.problems.append(f"{path} cannot be read: {e.strerror}")
        except ValueError as e:  # of decoding, and of lines that are no patterns
            self.problems.append(f"{path} should be a list of patterns in UTF-8: {e}")
        return None


class CodeSelection:
    """A walk through the absolute path ``source``, without the directories ``apart``. Links are not followed.

    Attributes:
        chosen: paths to copy, each after the directory around the path; the paths of directories end in a slash.
        imported: the chosen files of imported modules; the limits do not apply here.
        problems: why a path cannot be copied, by path.
        partial_because: why only Python sources and the files of imported modules are copied; None if everything is.
    """

    def __init__(self, source: pathlib.Path, rules: CodeRules, apart: Iterable[pathlib.Path]) -> None:
        self.source = source
        self.rules = rules
        self.problems: dict[str, str] = {}
        self.partial_because: str | None = None
        self._apart = _identify(apart)
        self._sizes: dict[str, int] = {}
        folders = self._walk()
        self.imported = set(filter(self._may_copy, _find_imported(source)))
        total = sum(self._sizes.values())
        if self.partial_because is None and total > _MAX_BYTES:
            sizes = f"{_mib(total)}, and no more than {_mib(_MAX_BYTES)} are copied"
            self.partial_because = f"the {len(self._sizes):,} files there have {sizes}"
        elif self.partial_because is None and rules.detignore_failed:
            self.partial_because = "the .detignore there cannot be read"
        if self.partial_because is None:
            self.chosen = [*folders, *sorted(self._sizes.keys() | self.imported)]
        else:
            self.chosen = sorted(self._sources_within_limit() | self.imported)

    def largest(self) -> list[tuple[str, int]]:
        """Return the largest files and directories at the top, with the sizes in bytes as far as seen."""
        totals: Counter[str] = Counter()
        for name, size in self._sizes.items():
            top, slash, _ = name.partition("/")
            totals[top + slash] += size
        return totals.most_common(3)

    def _sources_within_limit(self) -> set[str]:
        room = _MAX_BYTES - sum(self._sizes.get(name, 0) for name in self.imported)
        chosen = set()
        for name, size in self._sizes.items():
            if name not in self.imported and name.endswith(_SOURCE_SUFFIXES) and size <= room:
                room -= size
                chosen.add(name)
        return chosen

    def _walk(self) -> list[str]:
        """Note the files, level by level, since code is usually near the top; return the directories, with a slash."""
        seen = 0
        folders = []
        pending = deque([""])
        while pending and self.partial_because is None:
            folder = pending.popleft()
            listed = []
            try:
                with os.scandir(self.source / folder) as found:
                    listed = list(itertools.islice(found, _MAX_ENTRIES - seen + 1))
            except OSError as e:
                self.problems[folder or "."] = e.strerror or str(e)
            seen += len(listed)
            if seen > _MAX_ENTRIES:
                self.partial_because = f"it holds more than {_MAX_ENTRIES:,} files and directories"
            entries = {entry.name: entry for entry in listed}
            if not folder or not _is_environment_or_result(self.source / folder, entries.keys()):
                folders.append(folder)
                pending.extend(self._look_at(folder, entries))
        return folders[1:]

    def _look_at(self, folder: str, entries: Mapping[str, os.DirEntry[str]]) -> list[str]:
        """Note the files and problems among the entries of a directory; return the directories in it."""
        folders = []
        for _, entry in sorted(entries.items()):
            name = f"{folder}{entry.name}"
            try:
                is_directory = entry.is_dir(follow_symlinks=False)
                if self.rules.leaves_out(f"{name}/" if is_directory else name):
                    continue
                is_link = entry.is_symlink()
                if is_link and self.rules.leaves_out(f"{name}/"):
                    continue  # a rule for a directory also applies to a link to one
                if is_link:
                    self.problems[name] = "it is a link"
                elif not is_directory and not entry.is_file(follow_symlinks=False):
                    self.problems[name] = "it is neither a file nor a directory"
                elif _ODD_NAME.search(entry.name):
                    self.problems[name] = "not every storage can hold its name"
                elif not is_directory:
                    self._sizes[name] = entry.stat(follow_symlinks=False).st_size
                elif entry.name != layout.BOOKKEEPING_DIR and self._apart.isdisjoint(_identify([entry.path])):
                    folders.append(f"{name}/")
            except OSError as e:  # it may have vanished since the directory was listed
                self.problems[name] = e.strerror or str(e)
        return folders

    def _may_copy(self, name: str) -> bool:
        """Return whether a module's file may be copied, whatever rules other than ``.detignore`` say."""
        if self.rules.detignore(name) or _ODD_NAME.search(name):
            return False
        # The working directory itself may be the storage.
        folders = [self.source / parent for parent in pathlib.PurePosixPath(name).parents if parent.name]
        if not self._apart.isdisjoint(_identify(folders)):
            return False
        for folder in folders:
            with contextlib.suppress(OSError):  # then the module's file cannot be read either
                if _is_environment_or_result(folder, {*os.listdir(folder)}):  # noqa: PTH208 (faster)
                    return False
        return True


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


def _is_environment_or_result(folder: pathlib.Path, names: Set[str]) -> bool:
    """Return whether a directory with these ``names`` is an environment, a cache, an experiment or a checkpoint."""
    if not _MARKERS.isdisjoint(names) or names >= _OF_EXPERIMENT:
        return True
    descriptions = names & {layout.METADATA_FILE, layout.LOAD_DATA_FILE}
    described = any((folder / name).is_file() for name in descriptions)
    return described and any(os.path.lexists(folder / name) for name in (*layout.STATE_FILES, layout.CODE_DIR))


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


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.1f} MiB".replace(".0 ", " ")


@functools.cache
def _compile(patterns: str) -> pathspec.GitIgnoreSpec:
    """Return the rules of ``patterns``, each in the syntax of .gitignore; a later pattern overrides an earlier one."""
    return pathspec.GitIgnoreSpec.from_lines(patterns.split())
