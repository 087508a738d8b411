"""The files and lines of a project to leave unchanged, so that everything in need of Determined keeps running there."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterable

from det_lightning.porting.embedded_python import find_programs
from det_lightning.porting.entry_points import Reason, find_needs, find_needs_around
from det_lightning.porting.facts import Kind, read_command_facts
from det_lightning.porting.file_graph import FileGraph
from det_lightning.porting.file_port import OF_CI, FilePort, project_directory
from det_lightning.porting.findings import Finding, Need, Premise, Severity, line_at
from det_lightning.porting.requirements import install_both, is_install

# Not images: the Python there may be too old for det_lightning.
_INSTALL_BOTH = (Kind.commands, Kind.notebook)
_LOGICAL_LINE = re.compile(r"(?:[^\r\n]*\\\r?\n)*[^\r\n]*(?:\r\n|\r|\n|\Z)")
# A requirement, as opposed to a command of the same name.
_OURS = re.compile(r"det-lightning(?!\s+(?:run|experiment)\b)(?![\"']\s*,)|det-lightning[\"']\s*,\s*$")
_ON_ITS_OWN = re.compile(
    r"\s*(?:-\s+)?[\"']?det-lightning[^\s\"',]*[\"']?(?:\s*=\s*[\"'][^\"']*[\"'])?\s*(?:,|#.*|;.*)?\s*"
)


def keep_what_stays(ports: Iterable[FilePort]) -> list[FilePort]:
    """Return the files of a project, unchanged wherever Determined is still needed.

    Files that import or start unportable files stay, and so do modules sharing an API with such files, the commands to
    start all of these, and the requirement of Determined itself.
    """
    graph = FileGraph(ports)
    found = list(graph.ports.values())
    why = _reasons_to_stay(graph)
    # The needs of Determined, and the files in need of det_lightning; both count for all directories above.
    needs = [need for port in found for need in find_needs(port, Need.file, Need.script)]
    ours = [port.path for port in found if port.facts.uses_determined and port.path not in why]
    return [_keep(port, graph, why, needs, ours) for port in found]


def _reasons_to_stay(graph: FileGraph) -> dict[pathlib.Path, Reason]:
    """Return why files stay, by path. In shell scripts and notebooks perhaps only some lines stay."""
    why: dict[pathlib.Path, Reason] = {}
    found = graph.ports.values()
    for port in found:
        needs = [reason for file in graph.find_reached(port) for reason in find_needs(file, Need.file)]
        if port.is_configuration:
            needs = find_needs_around(graph, port)
        if needs:
            why[port.path] = needs[0]
    # Files started by a configuration on Determined are written for Determined.
    for port in [port for port in found if port.path in why and port.is_configuration]:
        for started in [*graph.find_started(port), *graph.find_named(port).values()]:
            why.setdefault(started.path, why[port.path])
    # Determined's classes cannot train our trials, and Determined's master gets no reports of our Core API.
    for port in [port for port in found if port.path in why]:
        for imported in graph.find_imports(port):
            if imported.facts.apis & port.facts.apis:
                why.setdefault(imported.path, why[port.path])
    return why


def _keep(
    port: FilePort,
    graph: FileGraph,
    why: dict[pathlib.Path, Reason],
    needs: list[Reason],
    ours: list[pathlib.Path],
) -> FilePort:
    """Return a file with the staying parts unchanged; ``why`` has the reasons by path."""
    if not port.changed:
        return _drop_checks(port) if port.path in why else port
    staying = {name: file for name, file in graph.find_named(port).items() if file.path in why}
    is_notebook = port.facts.kind is Kind.notebook
    before, after = (_lines(text, port.facts.kind) for text in (port.before, port.after))
    # A staying notebook is restored as a whole, and so is a notebook with both packages in one program.
    own = find_needs(port, Need.file, Need.script) if is_notebook else []
    is_mixed = is_notebook and (own or port.facts.apis or len(before) != len(after))
    reasons = [*own, *(why[file.path] for file in (port, *staying.values()) if file.path in why)]
    if reasons and (port.path.suffix == ".py" or port.is_configuration or is_mixed):
        staying_for = f"stays as it is, for Determined: {reasons[0]}"
        finding = Finding(0, Severity.note, staying_for, "port again after a change there")
        facts = dataclasses.replace(port.facts, imports_determined=True)
        findings = [finding, *_drop_checks(port).findings]
        return dataclasses.replace(port, after=port.before, findings=findings, facts=facts)
    directory = project_directory(port.path)
    needed = next((reason for reason in needs if reason.path.is_relative_to(directory)), None)
    needs_ours = any(path.is_relative_to(directory) for path in ours)
    if len(before) == len(after):
        return _keep_by_line(port, before, after, list(staying), needed, needs_ours)
    if needed is None or is_notebook or _is_code(port):
        return port
    # Lines were removed, for example a source of Determined's package.
    left = [*port.findings, _to_require(needed, 0)] if needs_ours else port.findings
    return dataclasses.replace(port, after=port.before, findings=sorted(left))


def _keep_by_line(
    port: FilePort, before: list[str], after: list[str], staying: list[str], needed: Reason | None, needs_ours: bool
) -> FilePort:
    """Restore the lines that start staying files, and require Determined, or both packages, where necessary."""
    stripped = {line.strip() for line in before}
    is_code = _is_code(port)
    of_ci = not set(OF_CI).isdisjoint(port.path.parts)
    has_both = needs_ours and (is_code or of_ci or port.facts.kind in _INSTALL_BOTH)
    lines = []
    findings = []
    line = 1
    for old, new in zip(before, after, strict=True):
        starts_staying = _starts(old, staying, port.facts.in_programs)
        # Unless these lines install det_lightning, a program stays together with the installation of Determined.
        stays = starts_staying or (needed and not has_both and bool(find_programs(old)))
        both = install_both(old, new) if needed and has_both else None
        if old == new or starts_staying or not _OURS.search(new) or (is_code and not is_install(old)):
            lines.append(old if stays else new)
        elif both is not None and not _OURS.search(old):
            lines.append(both)
        else:
            is_there = new.strip() in stripped or not (needed is None or needs_ours)
            required, found = _requirement(old, new, is_there, needed, line)
            lines.append(required)
            findings += found
        line = line_at(old, len(old), line)
    return dataclasses.replace(port, after="".join(lines), findings=sorted([*port.findings, *findings]))


def _is_code(port: FilePort) -> bool:
    """Return whether a file is Python without a list of requirements."""
    return port.path.suffix == ".py" and port.path.name != "setup.py"


def _starts(text: str, names: Iterable[str], in_programs: Collection[str]) -> bool:
    """Return whether commands name a file of ``names``, or import one of ``in_programs`` in an embedded program."""
    commands = [name for name in names if name not in in_programs]
    if any(re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", text) for name in commands):
        return True
    programs = set(names).intersection(in_programs)
    return bool(programs) and not programs.isdisjoint(read_command_facts(text).imports)


def _drop_checks(port: FilePort) -> FilePort:
    """Return a staying file without findings about running on det_lightning."""
    kept = [one for one in port.findings if one.severity is not Severity.check and one.premise is not Premise.changed]
    return dataclasses.replace(port, findings=kept)


def _lines(text: str, kind: Kind) -> list[str]:
    """Return the lines of a text. Lines joined by a backslash, and all lines of a Python program, count as one line."""
    programs = [] if kind is Kind.notebook else find_programs(text)  # a notebook has each command on a line
    lines = []
    start = 0
    for found in _LOGICAL_LINE.finditer(text):
        end = found.end()
        while programs and programs[0][1] < end:  # a here-document ends before the line with its mark
            programs.pop(0)
        if start < end and not (programs and programs[0][0] <= end):
            lines.append(text[start:end])
            start = end
    return lines


def _requirement(old: str, new: str, is_there: bool, needed: Reason | None, line: int) -> tuple[str, list[Finding]]:
    """Return the new text of a line that requires Determined, and the findings.

    With ``is_there``, no file needs the ``new`` line, or the file has the line already.
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
    return Finding(line, Severity.check, reason, "also require det-lightning")
