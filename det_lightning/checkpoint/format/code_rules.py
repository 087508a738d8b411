"""Rules that decide by name which files of a directory belong to the code of a trial."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import os
import pathlib
import stat
from collections.abc import Container
from typing import Any

import pathspec

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


class _UnreadableRulesError(Exception):
    """A file of rules cannot be read; the message says why."""


@dataclasses.dataclass(frozen=True)
class GitIgnores:
    """The ``.gitignore`` files that apply to a directory; there are none unless it is ``in_work_tree`` of a repository.

    ``specs`` are the rules of each, with the path of the directory that they are relative to, the innermost last.
    """

    in_work_tree: bool = False
    specs: tuple[tuple[str, pathspec.GitIgnoreSpec], ...] = ()

    def name(self, path: str) -> bool:
        """Return whether the rules name the absolute ``path``, which ends in a slash if it is a directory."""
        for base, spec in reversed(self.specs):
            verdict = spec.check_file(path.removeprefix(base)).include if path != base else None
            if verdict is not None:
                return verdict
        return False

    def entered(self, directory: str, names: Container[str], problems: list[str]) -> GitIgnores:
        """Return the rules for a directory in this one, which contains ``names``; add to ``problems``."""
        inner = GitIgnores(in_work_tree=True) if ".git" in names else self
        if not inner.in_work_tree or ".gitignore" not in names:
            return inner
        try:
            spec = _read_rules(pathlib.Path(directory, ".gitignore"), problems)
        except _UnreadableRulesError as e:
            problems.append(str(e))
            return inner
        return dataclasses.replace(inner, specs=(*inner.specs, (directory, spec)))

    @classmethod
    def around(cls, directory: pathlib.Path, problems: list[str]) -> GitIgnores:
        """Return the rules of the directories above ``directory``; none if they name the directory itself."""
        ignores = cls()
        for parent in reversed(directory.parents):
            if ignores.in_work_tree or os.path.lexists(parent / ".git"):
                names = {name for name in (".git", ".gitignore") if os.path.lexists(parent / name)}
                ignores = ignores.entered(f"{parent.as_posix().rstrip('/')}/", names, problems)
        is_named = ignores.name(f"{directory.as_posix().rstrip('/')}/")
        return cls(in_work_tree=ignores.in_work_tree) if is_named else ignores


class CodeRules:
    """The files that are left out of a copy of code, by name.

    ``.detignore`` comes first: a path that it names is left out, and one that it names with a ``!`` is not. After that
    secrets, paths that ``.gitignore`` names, and those that no trial needs are left out. ``problems`` are sentences on
    what is wrong with the files of rules; if ``detignore_failed``, the rules of ``.detignore`` are not known.
    """

    def __init__(self, source: pathlib.Path, with_secrets: bool = False) -> None:
        self.problems: list[str] = []
        self.detignore_failed = False
        self._source = source
        self._with_secrets = with_secrets
        self._detignore = pathspec.GitIgnoreSpec([])
        path = source / ".detignore"
        if os.path.lexists(path):
            try:
                self._detignore = _read_rules(path, self.problems)
            except _UnreadableRulesError as e:
                self.problems.append(str(e))
                self.detignore_failed = True

    def detignore(self, name: str) -> bool | None:
        """Return True if ``.detignore`` names a relative path, False if it does so with a ``!``, otherwise None."""
        return self._detignore.check_file(name).include

    def leaves_out(self, name: str, ignores: GitIgnores, secrets: list[str]) -> bool:
        """Return whether a relative path is left out; add it to ``secrets`` if its name suggests a secret."""
        by_detignore = self._detignore.check_file(name).include
        if by_detignore is not None:
            return by_detignore
        if not self._with_secrets and _compile(_SECRETS).match_file(name):
            secrets.append(name)
            return True
        return _compile(_NEVER_NEEDED).match_file(name) or ignores.name(f"{self._source}/{name}")

    def holds_key(self, beginning: bytes, name: str) -> bool:
        """Return whether a file that begins like this holds a private key and must be left out."""
        first_line = beginning[:100].lstrip().split(b"\n")[0]
        is_key = first_line.startswith(b"-----BEGIN ") and b"PRIVATE KEY" in first_line
        is_key = is_key or first_line.startswith(b"PuTTY-User-Key-File-")
        return is_key and not self._with_secrets and self.detignore(name) is not False


def _read_rules(path: pathlib.Path, problems: list[str]) -> pathspec.GitIgnoreSpec:
    """Read a file with the syntax of ``.gitignore``, in any encoding; add a sentence per problem to ``problems``."""
    patterns: list[Any] = []
    for line in _decoded_lines(path, _read_regular_file(path), problems):
        try:
            patterns += pathspec.GitIgnoreSpec.from_lines([line]).patterns
        except ValueError:
            problems.append(f"{path} has a line that is not a pattern: {line!r:.100}")
    return pathspec.GitIgnoreSpec(patterns)


def _read_regular_file(path: pathlib.Path) -> bytes:
    try:
        # Opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _UnreadableRulesError(f"{path} is not a file")
            content = file.read(_MAX_RULES_BYTES + 1)
    except OSError as e:
        raise _UnreadableRulesError(f"{path} cannot be read: {e.strerror}") from e
    if len(content) > _MAX_RULES_BYTES:
        raise _UnreadableRulesError(f"{path} has more than {_MAX_RULES_BYTES:,} bytes, and so is not a file of rules")
    return content


def _decoded_lines(path: pathlib.Path, content: bytes, problems: list[str]) -> list[str]:
    encoding = "utf-8-sig"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif b"\0" in content[:2]:
        encoding = "utf-16-be" if content[:1] == b"\0" else "utf-16-le"
    try:
        return content.decode(encoding).splitlines()
    except UnicodeDecodeError:
        if encoding != "utf-8-sig":
            raise _UnreadableRulesError(f"{path} cannot be read: it is neither UTF-8 nor {encoding.upper()}") from None
    problems.append(f"{path} is not UTF-8, and was read as Latin-1")
    # A name on the disk may consist of the bytes in the file, or of the letters that they stand for.
    return [*content.decode("latin-1").splitlines(), *os.fsdecode(content).splitlines()]


@functools.cache
def _compile(patterns: str) -> pathspec.GitIgnoreSpec:
    """Return the rules of ``patterns``, each in the syntax of .gitignore; a later one overrides an earlier one."""
    return pathspec.GitIgnoreSpec.from_lines(patterns.split())
