"""What stays as it is in a project, so that whatever still needs Determined keeps running on it."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable

from det_lightning.porting.entry_points import Reason, needs_of
from det_lightning.porting.facts import Kind
from det_lightning.porting.file_graph import FileGraph
from det_lightning.porting.file_port import FilePort
from det_lightning.porting.findings import Finding, Need, Premise, Severity, line_at

_LOGICAL_LINE = re.compile(r"(?:[^\r\n]*\\\r?\n)*[^\r\n]*(?:\r\n|\r|\n|\Z)")
# A requirement, as opposed to a command of the same name.
_OURS = re.compile(r"det-lightning(?!\s+(?:run|experiment)\b)(?![\"']\s*,)|det-lightning[\"']\s*,\s*$")
_ON_ITS_OWN = re.compile(
    r"\s*(?:-\s+)?[\"']?det-lightning[^\s\"',]*[\"']?(?:\s*=\s*[\"'][^\"']*[\"'])?\s*(?:,|#.*|;.*)?\s*"
)


def keep_what_stays(ports: Iterable[FilePort]) -> list[FilePort]:
    """Return the files of a project, with everything for which Determined is still needed left as it was.

    This includes whatever imports or starts what cannot be ported; what such code passes trials to, or gets them from;
    the commands that start it; and the requirement of Determined itself.
    """
    graph = FileGraph(ports)
    found = list(graph.ports.values())
    why: dict[pathlib.Path, Reason] = {}
    for port in found:
        needs = [reason for file in graph.reached_by(port) for reason in needs_of(file, Need.file)]
        if needs:
            why[port.path] = needs[0]
    # Determined's classes cannot train a trial of det_lightning, nor the other way round.
    for port in found:
        if port.path in why and port.facts.uses_trials:
            for imported in [file for file in graph.imported_by(port) if file.facts.uses_trials]:
                why.setdefault(imported.path, why[port.path])
    # Whatever keeps the requirement of Determined in the directories above it.
    needs = [need for port in found for need in needs_of(port, Need.file, Need.script)]
    return [_kept(port, graph, why, needs) if port.changed else port for port in found]


def _kept(port: FilePort, graph: FileGraph, why: dict[pathlib.Path, Reason], needs: list[Reason]) -> FilePort:
    """Return a file in which what stays, for the reason that ``why`` gives for its path, is as it was."""
    staying = {name: file for name, file in graph.named_by(port).items() if file.path in why}
    is_python = port.path.suffix == ".py"
    # A notebook is restored as a whole where lines would not do: ours and theirs would meet in one program.
    is_whole = is_python or port.facts.kind is Kind.configuration
    if is_whole or (port.facts.kind is Kind.notebook and port.facts.uses_trials):
        for file in (port, *staying.values()):
            if file.path in why:
                return _restored(port, why[file.path])
    if is_python and port.path.name != "setup.py":
        return port
    needed = next((reason for reason in needs if reason.path.is_relative_to(port.path.parent)), None)
    return _kept_by_line(port, list(staying), needed)


def _kept_by_line(port: FilePort, staying: list[str], needed: Reason | None) -> FilePort:
    """Restore the lines that start what stays, and require both where both are needed."""
    before = _lines(port.before)
    after = _lines(port.after)
    if len(before) != len(after):
        return port
    stripped = {line.strip() for line in before}
    lines = []
    findings = []
    line = 1
    for old, new in zip(before, after, strict=True):
        starts_staying = any(re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", old) for name in staying)
        if old == new or starts_staying or not _OURS.search(new):
            lines.append(old if starts_staying else new)
        else:
            # Of a notebook the lines of the code are counted, not those of the file.
            shown = 0 if port.facts.kind is Kind.notebook else line
            required, found = _requirement(old, new, new.strip() in stripped, needed, shown)
            lines.append(required)
            findings += found
        line = line_at(old, len(old), line)
    return dataclasses.replace(port, after="".join(lines), findings=sorted([*port.findings, *findings]))


def _restored(port: FilePort, why: Reason) -> FilePort:
    finding = Finding(0, Severity.note, f"stays as it is, for Determined: {why}", "port again when that is changed")
    facts = dataclasses.replace(port.facts, imports_determined=True)
    others = [found for found in port.findings if found.premise is not Premise.changed]
    return dataclasses.replace(port, after=port.before, findings=[finding, *others], facts=facts)


def _lines(text: str) -> list[str]:
    """Return the lines of a text; lines joined by a backslash are returned as one."""
    return [found.group() for found in _LOGICAL_LINE.finditer(text) if found.group()]


def _requirement(old: str, new: str, is_there: bool, needed: Reason | None, line: int) -> tuple[str, list[Finding]]:
    """Return what to write for a line that requires Determined, and what is left to do about it.

    If ``is_there``, the file already had the ``new`` line.
    """
    if needed is None:
        return ("" if is_there else new), []
    if is_there:
        return old, []
    if _ON_ITS_OWN.fullmatch(new):
        return (old if old.endswith("\n") else f"{old}\n") + new, []
    reason = f"Determined is still required, for {needed}"
    return old, [Finding(line, Severity.check, reason, "require det-lightning beside it")]
