"""Rules that decide by name which files of a directory belong to the code of a trial."""

from __future__ import annotations

import codecs
import functools
import os
import pathlib
import stat
import sys
from collections.abc import Container, Set
from typing import Any

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

# Far more than anyone writes by hand.
_MAX_RULES_BYTES = 1024 * 1024

# A directory with one of these is an environment or a cache.
_MARKERS = {"pyvenv.cfg", "conda-meta", "CACHEDIR.TAG", layout.STAGING_MARK}
# A directory with all of these is an experiment of `det-lightning run`.
_OF_EXPERIMENT = {"events.jsonl", "config.json"}

#: The ``.gitignore`` files that apply to a directory: the path that each is relative to and its rules, the innermost
#: last. None outside of a repository's work tree, where none apply.
GitIgnores = tuple[tuple[str, pathspec.GitIgnoreSpec], ...] | None


class CodeRules:
    """The files below the absolute path ``source`` that are left out of a copy of code, by name.

    ``.detignore`` comes first: a path that it names is left out, and one that it names with a ``!`` is not. After that
    secrets, paths that ``.gitignore`` names, and those that no trial needs are left out.

    Attributes:
        problems: what is wrong with the files of rules, one sentence each.
        detignore_failed: the rules of ``.detignore`` are not known.
        secrets: paths that are left out because their names suggest secrets.
    """

    def __init__(self, source: pathlib.Path, with_secrets: bool) -> None:
        self.problems: list[str] = []
        self.secrets: list[str] = []
        self._source = source
        self._with_secrets = with_secrets
        path = source / ".detignore"
        rules = _read_rules(path, self.problems) if os.path.lexists(path) else pathspec.GitIgnoreSpec([])
        self.detignore_failed = rules is None
        self._detignore = pathspec.GitIgnoreSpec([]) if rules is None else rules

    def detignore(self, name: str) -> bool | None:
        """Return True if ``.detignore`` names a relative path, False if it does so with a ``!``, otherwise None."""
        return self._detignore.check_file(name).include

    def leaves_out(self, name: str, ignores: GitIgnores) -> bool:
        """Return whether a relative path is left out; it ends in a slash if it is a directory."""
        by_detignore = self._detignore.check_file(name).include
        if by_detignore is not None:
            return by_detignore
        if not self._with_secrets and _compile(_SECRETS).match_file(name):
            self.secrets.append(name)
            return True
        return _compile(_NEVER_NEEDED).match_file(name) or (
            bool(ignores) and _is_named(f"{self._source}/{name}", ignores)
        )

    def ignores_above(self) -> GitIgnores:
        """Return the rules of the directories above the source; none if they name the source itself."""
        ignores: GitIgnores = None
        for parent in reversed(self._source.parents):
            if ignores is not None or os.path.lexists(parent / ".git"):
                names = {name for name in (".git", ".gitignore") if os.path.lexists(parent / name)}
                ignores = self.ignores_in(f"{parent.as_posix().rstrip('/')}/", names, ignores)
        return () if ignores and _is_named(f"{self._source.as_posix().rstrip('/')}/", ignores) else ignores

    def ignores_in(self, directory: str, names: Container[str], above: GitIgnores) -> GitIgnores:
        """Return the rules for a directory that contains ``names``, given those for the directory above it."""
        ignores = () if ".git" in names else above
        if ignores is None or ".gitignore" not in names:
            return ignores
        rules = _read_rules(pathlib.Path(directory, ".gitignore"), self.problems)
        return ignores if rules is None else (*ignores, (directory, rules))


def _is_named(path: str, ignores: GitIgnores) -> bool:
    for base, rules in reversed(ignores or ()):
        verdict = rules.check_file(path.removeprefix(base)).include
        if verdict is not None:
            return verdict
    return False


def is_environment_or_result(folder: pathlib.Path, names: Set[str]) -> bool:
    """Return whether a directory that contains ``names`` is an environment, a cache, an experiment or a checkpoint."""
    if not _MARKERS.isdisjoint(names) or names >= _OF_EXPERIMENT:
        return True
    descriptions = names & {layout.METADATA_FILE, layout.LOAD_DATA_FILE}
    described = any((folder / name).is_file() for name in descriptions)
    return described and any(os.path.lexists(folder / name) for name in (*layout.STATE_FILES, layout.CODE_DIR))


def _read_rules(path: pathlib.Path, problems: list[str]) -> pathspec.GitIgnoreSpec | None:
    """Read a file with the syntax of ``.gitignore``, or return None; add a sentence per problem to ``problems``."""
    patterns: list[Any] = []
    try:
        lines = _read_lines(path, problems)
    except (OSError, ValueError) as e:
        problems.append(f"{path} cannot be read: {e.strerror}" if isinstance(e, OSError) else f"{path} {e}")
        return None
    for line in lines:
        try:
            patterns += pathspec.GitIgnoreSpec.from_lines([line]).patterns
        except ValueError:
            problems.append(f"{path} has a line that is not a pattern: {line!r:.100}")
    return pathspec.GitIgnoreSpec(patterns)


def _read_lines(path: pathlib.Path, problems: list[str]) -> list[str]:
    """Read a file in any encoding; raise a ``ValueError`` that says why it is not a file of rules."""
    status, content = read_regular_file(path, most_bytes=_MAX_RULES_BYTES)
    if content is None:
        raise ValueError("is not a file")
    if status.st_size > _MAX_RULES_BYTES:
        raise ValueError(f"has more than {_MAX_RULES_BYTES:,} bytes, and so is not a file of rules")
    encoding = "utf-8-sig"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif b"\0" in content[:2]:
        encoding = "utf-16-be" if content[:1] == b"\0" else "utf-16-le"
    try:
        return content.decode(encoding).splitlines()
    except UnicodeDecodeError:
        if encoding != "utf-8-sig":
            raise ValueError(f"cannot be read: it is neither UTF-8 nor {encoding.upper()}") from None
    problems.append(f"{path} is not UTF-8, and was read as Latin-1")
    # A name on the disk may consist of the bytes in the file, or of the letters that they stand for.
    return [*content.decode("latin-1").splitlines(), *os.fsdecode(content).splitlines()]


def read_regular_file(
    path: pathlib.Path, most_bytes: int = sys.maxsize, flags: int = 0
) -> tuple[os.stat_result, bytes | None]:
    """Return the status of a file and its content, which is None if it is not a regular file.

    It is opened with further ``flags``, and no more is read than its size at the start, or ``most_bytes``.
    """
    # Opening a FIFO must not wait for a writer.
    flags |= os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return status, None
    with os.fdopen(descriptor, "rb") as file:
        return status, file.read(min(status.st_size, most_bytes))


@functools.cache
def _compile(patterns: str) -> pathspec.GitIgnoreSpec:
    """Return the rules of ``patterns``, each in the syntax of .gitignore; a later one overrides an earlier one."""
    return pathspec.GitIgnoreSpec.from_lines(patterns.split())
