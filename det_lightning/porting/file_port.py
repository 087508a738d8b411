"""Ports one file: its kind, encoding, old and new content, and findings."""

from __future__ import annotations

import codecs
import dataclasses
import importlib
import io
import pathlib
import re
import tokenize
from collections.abc import Callable
from typing import Any

from det_lightning.files.local_files import write_whole
from det_lightning.porting.facts import Facts, Kind, find_reads, list_bases
from det_lightning.porting.findings import Finding, Need, Premise, Severity, drop_resolved

#: Directories for continuous integration.
OF_CI = (".github", ".circleci")

_BOM = "\ufeff"
# Notebooks with pictures have several million.
_MOST_BYTES = 100 * 1024 * 1024
_PYTHON = (".py", ".pyi", ".pyw")
_MENTIONED = re.compile(r"\bdetermined", re.IGNORECASE)
_FactsOf = Callable[[str], Facts]
# By pattern of a file's name, the first match counts: the function to port the text, and the reader of facts, if any.
# The functions are imported late, because each module needs a library of its own.
_KINDS: dict[str, tuple[str, str | None]] = {
    r"(?is).+\.pyw?": ("python_files.port_python", "facts.read_python_facts"),
    r"(?is).+\.pyi": ("python_files.port_python", None),
    r"(?is).+\.ipynb": ("notebooks.port_notebook", "notebooks.read_notebook_facts"),
    r"(?is).+\.ya?ml": ("yaml_files.port_yaml", "facts.read_yaml_facts"),
    r"(?i)(?:docker|container)file.*|.*\.(?:docker|container)file": ("commands.port_dockerfile", None),
    r"(?i).*(?:requirements|constraints).*\.(?:txt|in)": ("requirements.port_requirements_file", None),
    r"pyproject\.toml|Pipfile": ("requirements.port_toml_file", None),
    r"setup\.cfg|tox\.ini": ("requirements.port_ini_file", None),
    r"startup-hook\.sh": ("commands.port_startup_hook", "facts.read_command_facts"),
    r"(?i).*\.(?:ba|z|k)?sh|.*\.(?:mk|slurm|sbatch|pbs)|(?:gnu)?makefile|justfile": (
        "commands.port_shell",
        "facts.read_command_facts",
    ),
}
_Port = Callable[[str], tuple[str, list[Finding]]]


@dataclasses.dataclass(frozen=True)
class FilePort:
    """The content of a file before and after porting, with findings and facts."""

    path: pathlib.Path
    before: str
    after: str
    findings: list[Finding]
    encoding: str = "utf-8"
    may_be_written: bool = True  # otherwise a finding says why not
    facts: Facts = dataclasses.field(default_factory=Facts)

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def is_configuration(self) -> bool:
        return self.facts.kind is Kind.configuration

    def write(self) -> None:
        """Replace the file by a new file with the ported content, or raise OSError; hard links keep the old content."""
        if self.path.is_symlink():
            raise OSError(f"{self.path} is a link, and nothing is written through a link")
        write_whole(self.path, self.after.encode(self.encoding), keeps_mode=True)

    def refuse_writing(self, reason: str, advice: str) -> FilePort:
        finding = Finding(0, Severity.problem, f"not written: {reason}", advice)
        return dataclasses.replace(self, findings=[finding, *self.findings], may_be_written=False)


def is_portable(path: pathlib.Path) -> bool:
    """Return whether the porting tool reads files of this kind."""
    return _find_kind(path) is not None


def port_file(path: pathlib.Path) -> FilePort:
    """Port a file, without writing. An unreadable file stays; if the file uses Determined, a finding says so."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        finding = Finding(0, Severity.problem, f"not ported: it has {size:,} bytes", "port it by hand, if it is code")
        return FilePort(path, "", "", [finding])
    content = path.read_bytes()
    encoding = _detect_encoding(path, content)
    try:
        text = content.decode(encoding)
        # Some of Python's codecs write other text than read, for example without line breaks.
        is_readable = text.encode(encoding, "replace") == content and "line\n".encode(encoding) == b"line\n"
    except (UnicodeError, LookupError):
        is_readable = False
    if not is_readable:
        return FilePort(path, "", "", _note_unreadable(content.decode("latin-1"), f"it is not encoded as {encoding}"))
    if "\0" in text:  # not text, perhaps a large file without content
        return FilePort(path, "", "", [], encoding)
    kind = import_port(path)
    if kind is None:
        return FilePort(path, text, text, [], encoding)
    port, facts_of = kind
    body = text.removeprefix(_BOM)
    mark = text.removesuffix(body)
    try:
        ported, findings = port(body)
        if ported != body:
            port(ported)  # the new text must be readable
    except Exception as e:
        reason = _explain_error(e, body)
        if reason is None:
            raise
        return FilePort(path, text, text, _note_unreadable(body, reason), encoding)
    # A line of a notebook's file may have many lines of code.
    left = drop_resolved(findings, "" if path.suffix.lower() == ".ipynb" else body)
    if needs := [found for found in left if found.needs_determined is Need.file]:
        left = [found for found in left if found.severity is Severity.problem and found.premise is not Premise.changed]
        left += [] if ported == body else [_note_unchanged(needs[0])]
        ported = body
    facts = Facts() if facts_of is None else facts_of(ported)
    if facts.uses_determined and path.suffix == ".py":
        facts = dataclasses.replace(facts, reads=find_reads(body), bases=list_bases(body))
    return FilePort(path, text, mark + ported, sorted(left), encoding, facts=facts)


def import_port(path: pathlib.Path) -> tuple[_Port, _FactsOf | None] | None:
    """Return the functions that port a file of this name and read its facts, or None."""
    kind = _find_kind(path)
    if kind is None:
        return None
    port, facts_of = kind
    return _import(port), None if facts_of is None else _import(facts_of)


def _import(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"det_lightning.porting.{module}"), function)


def _lists_requirements(path: pathlib.Path) -> bool:
    return path.absolute().parent.name.lower() == "requirements"


def _find_kind(path: pathlib.Path) -> tuple[str, str | None] | None:
    given = [path.name, *([f"requirements/{path.name}"] if _lists_requirements(path) else [])]
    return next((kind for name in given for names, kind in _KINDS.items() if re.fullmatch(names, name)), None)


def _detect_encoding(path: pathlib.Path, content: bytes) -> str:
    if path.suffix.lower() not in _PYTHON or content.startswith(codecs.BOM_UTF8):
        return "utf-8"
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError:
        return "anything that is known"
    return encoding


def _explain_error(error: Exception, text: str) -> str | None:
    """Return why a file is not of the kind that its name says, or None for another error."""
    import libcst
    from ruamel.yaml.error import YAMLError

    from det_lightning.config.yaml_reader import explain_error
    from det_lightning.porting.notebooks import NotebookError

    if isinstance(error, libcst.ParserSyntaxError):
        return f"it is not Python 3: line {error.raw_line}: {error.message}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, YAMLError):
        line, problem = explain_error(error, text)
        return problem if line is None else f"line {line}: {problem}"
    return str(error) if isinstance(error, NotebookError) else None


def _note_unchanged(need: Finding) -> Finding:
    reason = f"left unchanged as a whole, because of line {need.line} ({need.reason.partition(':')[0]})"
    return Finding(0, Severity.note, reason, "port it again after a change there")


def _note_unreadable(text: str, why: str) -> list[Finding]:
    if not _MENTIONED.search(text):
        return []
    advice = "port it by hand, or make it readable first"
    return [Finding(0, Severity.problem, f"not ported: {why}", advice, Need.file)]
