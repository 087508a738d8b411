"""The output of ``det-lightning port``: a patch, findings, and the outcome of each entry point."""

from __future__ import annotations

import difflib
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from det_lightning.cli.output import warn
from det_lightning.escaping import escape
from det_lightning.porting import EntryPoint, FilePort, ProjectPort, Severity

_COLORS = {"+++": "bold", "---": "bold", "@@": "cyan", "+": "green", "-": "red"}


def project_as_json(project: ProjectPort, with_diff: bool) -> dict[str, Any]:
    """Return the output of ``--json``."""
    return {
        "files": [_as_json(port, with_diff) for port in project.files],
        "entry_points": [_entry_as_json(entry) for entry in project.entry_points],
        "unchecked": project.unchecked,
    }


def _entry_as_json(entry: EntryPoint) -> dict[str, Any]:
    reasons = [{"path": str(one.path), "line": one.finding.line, "reason": one.finding.reason} for one in entry.reasons]
    content = {"path": str(entry.port.path), "outcome": entry.outcome.value, "command": entry.command}
    return {**content, "reasons": reasons, "sentence": entry.sentence, "state": entry.state}


def _as_json(port: FilePort, with_diff: bool) -> dict[str, Any]:
    findings = [
        {"line": found.line, "level": found.severity.value, "reason": found.reason, "advice": found.advice}
        for found in port.findings
    ]
    content = {"path": str(port.path), "changed": port.changed, "may_be_written": port.may_be_written}
    diff = {"diff": "".join(_diff_lines(port))} if with_diff else {}
    return {**content, "findings": findings, **diff}


def _diff_lines(port: FilePort) -> Iterator[str]:
    before = port.before.splitlines(keepends=True)
    after = port.after.splitlines(keepends=True)
    # A name with a line break would end the header, and could add lines to the patch.
    name = escape(port.path)
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def print_diff(changed: list[FilePort]) -> None:
    """Print a patch."""
    if not sys.stdout.isatty():
        # Bytes, so that line endings are kept and the output is a valid patch.
        for port in changed:
            sys.stdout.buffer.write("".join(_diff_lines(port)).encode(port.encoding, "replace"))
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for port in changed:
        for line in _diff_lines(port):
            style = next((color for prefix, color in _COLORS.items() if line.startswith(prefix)), "")
            shown = "\t".join(escape(part) for part in line.rstrip("\r\n").split("\t"))
            console.print(Text(shown, style=style))


def print_findings(ports: list[FilePort]) -> None:
    """Print the findings to standard error."""
    for port in ports:
        for found in port.findings:
            position = f"{port.path}:{found.line}" if found.line else str(port.path)
            warn(f"{position}: {found.severity.value}: {found.reason}")
            warn(f"→ {found.advice}.")


def print_summary(project: ProjectPort, paths: list[pathlib.Path], changed: int, written: bool) -> None:
    """Write the outcome of each entry point, and how much is left."""
    ports = project.files
    if not ports and not project.entry_points:
        names = ", ".join(map(str, paths))
        warn(f"Nothing to port: nothing in {names} uses determined in a way that must change.")
        return
    for entry in project.entry_points:
        warn(f"{entry.port.path}: {entry.sentence}.")
    for sentence in project.unchecked:
        warn(f"{sentence}.")
    counts = Counter(found.severity for port in ports for found in port.findings)
    parts = [f"{counts[kind]} {kind.value}{'s' if counts[kind] > 1 else ''}" for kind in Severity if counts[kind]]
    left = f"left to you: {', '.join(parts)}" if parts else "nothing is left for you to do"
    warn(f"{changed} file{'' if changed == 1 else 's'} {'changed' if written else 'to change'}; {left}.")
