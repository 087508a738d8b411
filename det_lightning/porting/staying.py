"""What stays in a project, so that whatever still needs Determined keeps running on it."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable

from det_lightning.porting.embedded_python import programs_in
from det_lightning.porting.entry_points import Reason, needs_around, needs_of
from det_lightning.porting.facts import Kind
from det_lightning.porting.file_graph import FileGraph
from det_lightning.porting.file_port import OF_CI, FilePort, project_directory
from det_lightning.porting.findings import Finding, Need, Premise, Severity, line_at
from det_lightning.porting.requirements import install_both

# Not an image, whose Python may be too old for det_lightning.
_INSTALL_BOTH = (Kind.commands, Kind.notebook)
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
    why = _reasons_to_stay(graph)
    # Whatever keeps the requirement of Determined in the directories above it, and what needs det_lightning there.
    needs = [need for port in found for need in needs_of(port, Need.file, Need.script)]
    ours = [port.path for port in found if port.facts.uses_determined and port.path not in why]
    return [_kept(port, graph, why, needs, ours) for port in found]


def _reasons_to_stay(graph: FileGraph) -> dict[pathlib.Path, Reason]:
    """Return why files stay, by their paths; of shell scripts and notebooks only some lines may."""
    why: dict[pathlib.Path, Reason] = {}
    for port in graph.ports.values():
        needs = [reason for file in graph.reached_by(port) for reason in needs_of(file, Need.file)]
        if port.is_configuration:
            needs = needs_around(graph, port)
        if needs:
            why[port.path] = needs[0]
    staying = [port for port in graph.ports.values() if port.path in why]
    # What a configuration starts on Determined is made for it.
    for port in staying:
        if port.is_configuration:
            for started in [*graph.started_by(port), *graph.named_by(port).values()]:
                why.setdefault(started.path, why[port.path])
    # Determined's classes cannot train a trial of det_lightning, nor does its master get what our Core API reports.
    staying = [port for port in graph.ports.values() if port.path in why]
    for port in staying:
        for imported in graph.imported_by(port):
            if imported.facts.apis & port.facts.apis:
                why.setdefault(imported.path, why[port.path])
    return why


def _kept(
    port: FilePort,
    graph: FileGraph,
    why: dict[pathlib.Path, Reason],
    needs: list[Reason],
    ours: list[pathlib.Path],
) -> FilePort:
    """Return a file in which what stays, for the reason that ``why`` gives for its path, is as it was."""
    if not port.changed:
        return _unchecked(port) if port.path in why else port
    staying = {name: file for name, file in graph.named_by(port).items() if file.path in why}
    is_python = port.path.suffix == ".py"
    # A notebook is restored as a whole where lines would not do: ours and theirs would meet in one program.
    is_whole = is_python or port.is_configuration
    if is_whole or (port.facts.kind is Kind.notebook and port.facts.apis):
        for file in (port, *staying.values()):
            if file.path in why:
                return _restored(port, why[file.path])
    if is_python and port.path.name != "setup.py":
        return port
    directory = project_directory(port.path)
    needed = next((reason for reason in needs if reason.path.is_relative_to(directory)), None)
    return _kept_by_line(port, list(staying), needed, any(path.is_relative_to(directory) for path in ours))


def _kept_by_line(port: FilePort, staying: list[str], needed: Reason | None, needs_ours: bool) -> FilePort:
    """Restore the lines that start what stays, and require Determined, or both, where that is needed."""
    before = _lines(port.before, port.facts.kind)
    after = _lines(port.after, port.facts.kind)
    if len(before) != len(after):
        if needed is None:
            return port
        # Lines were removed, such as a source of Determined's package.
        left = [*port.findings, _to_require(needed, 0)] if needs_ours else port.findings
        return dataclasses.replace(port, after=port.before, findings=sorted(left))
    stripped = {line.strip() for line in before}
    may_have_both = port.facts.kind in _INSTALL_BOTH or not set(OF_CI).isdisjoint(port.path.parts)
    lines = []
    findings = []
    line = 1
    for old, new in zip(before, after, strict=True):
        starts_staying = any(re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", old) for name in staying)
        both = install_both(old, new) if needed and needs_ours and may_have_both else None
        if old == new or starts_staying or not _OURS.search(new):
            lines.append(old if starts_staying else new)
        elif both is not None and not _OURS.search(old):
            lines.append(both)
        else:
            # Of a notebook the lines of the code are counted, not those of the file.
            shown = 0 if port.facts.kind is Kind.notebook else line
            is_there = new.strip() in stripped or not (needed is None or needs_ours)
            required, found = _requirement(old, new, is_there, needed, shown)
            lines.append(required)
            findings += found
        line = line_at(old, len(old), line)
    return dataclasses.replace(port, after="".join(lines), findings=sorted([*port.findings, *findings]))


def _restored(port: FilePort, why: Reason) -> FilePort:
    finding = Finding(0, Severity.note, f"stays as it is, for Determined: {why}", "port again when that is changed")
    facts = dataclasses.replace(port.facts, imports_determined=True)
    others = _unchecked(port).findings
    return dataclasses.replace(port, after=port.before, findings=[finding, *others], facts=facts)


def _unchecked(port: FilePort) -> FilePort:
    """Return a file that stays without the findings that are about running it on det_lightning."""
    kept = [one for one in port.findings if one.severity is not Severity.check and one.premise is not Premise.changed]
    return dataclasses.replace(port, findings=kept)


def _lines(text: str, kind: Kind) -> list[str]:
    """Return the lines of a text; those that a backslash joins, or that a Python program is in, are returned as one."""
    programs = [] if kind is Kind.notebook else programs_in(text)  # a command of a notebook is one line there
    lines = []
    start = 0
    for found in _LOGICAL_LINE.finditer(text):
        end = found.end()
        while programs and programs[0][1] <= end:
            programs.pop(0)
        if start < end and not (programs and programs[0][0] <= end):
            lines.append(text[start:end])
            start = end
    return lines


def _requirement(old: str, new: str, is_there: bool, needed: Reason | None, line: int) -> tuple[str, list[Finding]]:
    """Return what to write for a line that requires Determined, and what is left to do about it.

    If ``is_there``, nothing needs the ``new`` line, which the file may already have.
    """
    if needed is None:
        return ("" if is_there else new), []
    if is_there or _OURS.search(old):
        return old, []
    if _ON_ITS_OWN.fullmatch(new):
        return (old if old.endswith("\n") else f"{old}\n") + new, []
    return old, [_to_require(needed, line)]


def _to_require(needed: Reason, line: int) -> Finding:
    reason = f"Determined is still required, for {needed}"
    return Finding(line, Severity.check, reason, "require det-lightning beside it")
