"""``det-lightning port``: what would change, what was changed, and what is left to do."""

from __future__ import annotations

import difflib
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from det_lightning.cli.output import print_json, print_lines, warn
from det_lightning.escaping import escape
from det_lightning.porting import FilePort, Level, port_paths

__all__ = ["port_project"]

_COLORS = {"+++": "bold", "---": "bold", "@@": "cyan", "+": "green", "-": "red"}


def port_project(paths: list[pathlib.Path], write: bool, check: bool, diff: bool, as_json: bool) -> bool:
    """Port the files below ``paths``; return whether nothing is left to change or to do."""
    ports = port_paths(paths)
    if write:
        ports = [_written(port) for port in ports]
    changed = [port for port in ports if port.changed and (port.may_be_written or not write)]
    if as_json:
        print_json({"files": [_for_json(port, diff) for port in ports]})
    else:
        if diff:
            _print_diff(changed)
        elif changed:
            print_lines(f"{'ported' if write else 'to port'}: {port.path}" for port in changed)
        _tell_findings(ports)
        _tell_summary(ports, paths, written=write)
    left = any(finding.level is not Level.note for port in ports for finding in port.findings)
    return not left and not changed


def _written(port: FilePort) -> FilePort:
    """Write a file if that is to be; return it, with a finding if it can not be written."""
    if port.changed and port.may_be_written:
        try:
            port.write()
        except OSError as e:
            return port.not_written(str(e), "make it possible to write the file and its directory")
    return port


def _for_json(port: FilePort, with_diff: bool) -> dict[str, Any]:
    findings = [
        {"line": found.line, "level": found.level.value, "reason": found.reason, "advice": found.advice}
        for found in port.findings
    ]
    told = {
        "path": str(port.path),
        "changed": port.changed,
        "may_be_written": port.may_be_written,
        "findings": findings,
    }
    return {**told, "diff": "".join(_diff_lines(port))} if with_diff else told


def _diff_lines(port: FilePort) -> Iterator[str]:
    before, after = (text.splitlines(keepends=True) for text in (port.before, port.after))
    for line in difflib.unified_diff(before, after, f"a/{port.path}", f"b/{port.path}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _print_diff(changed: list[FilePort]) -> None:
    if not sys.stdout.isatty():
        # Bytes, so that the ends of lines stay what they are and the output is a patch.
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
            console.print(Text(_harmless(line.rstrip("\r\n")), style=style))


def _harmless(line: str) -> str:
    """Return a line of a file without what could steer a terminal."""
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line)


def _tell_findings(ports: list[FilePort]) -> None:
    for port in ports:
        for found in port.findings:
            place = f"{escape(port.path)}:{found.line}" if found.line else escape(port.path)
            warn(f"{place}: {found.level.value}: {found.reason}")
            warn(f"→ {found.advice}.")


def _tell_summary(ports: list[FilePort], paths: list[pathlib.Path], written: bool) -> None:
    if not ports:
        places = ", ".join(map(str, paths))
        warn(f"Nothing to port: nothing in {places} uses determined in a way that has to change.")
        return
    count = sum(port.changed and (port.may_be_written or not written) for port in ports)
    levels = Counter(found.level for port in ports for found in port.findings)
    told = [f"{levels[level]} {level.value}{'s' if levels[level] > 1 else ''}" for level in Level if levels[level]]
    left = f"left to you: {', '.join(told)}" if told else "nothing is left to you"
    warn(f"{count} file{'' if count == 1 else 's'} {'changed' if written else 'to change'}; {left}.")
