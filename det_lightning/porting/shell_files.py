"""Shell scripts, startup hooks and Dockerfiles."""

from __future__ import annotations

import re

from det_lightning.porting.commands import (
    IMPORTED,
    note_container_paths,
    note_variables,
    port_commands,
    port_det_commands,
)
from det_lightning.porting.findings import Finding, Severity, line_at
from det_lightning.porting.requirements import port_installs, useless_installs
from det_lightning.startup_hook import is_accepted

# For a hook that no comment accepts.
_RUNS_HERE = "it runs in your own environment, not in a container; det-lightning run asks for --hook run or --hook skip"
_INSTALL_ONCE = (
    "install its packages once, in a virtual environment, and start with --hook skip; or accept the hook with the "
    "comment `# det-lightning: ok` in it: pip may replace torch itself by another release"
)
_COMMENTS = re.compile(r"(^[ \t]*#[^\n]*\n?)", re.MULTILINE)
_PROGRAM = "port the code by hand, or keep it in a separate file"
_IMAGE = re.compile(r"^[ \t]*(?:FROM\s+(?:--\S+\s+)*|ARG\s+\w+=)(\S*determinedai/\S+)", re.MULTILINE | re.IGNORECASE)


def port_shell(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return shell commands with launch layers and packages rewritten, and findings for the rest. Comments stay."""
    findings: list[Finding] = []
    written = []
    line = first_line
    for number, part in enumerate(_COMMENTS.split(text)):
        written.append(part if number % 2 else _port_part(part, line, findings))
        line += part.count("\n")
    return "".join(written), findings


def _port_part(part: str, line: int, findings: list[Finding]) -> str:
    ported, launched = port_commands(part, line)
    ported, left = port_det_commands(ported, line)
    # Variables in options of det go with the options.
    variables = [found for found in note_variables(part, line) if found.reason.partition(":")[0] in ported]
    paths = note_container_paths(part, line)
    programs = [
        Finding(line_at(part, found.start(1), line), Severity.problem, f"Python in a command: {found[1]}", _PROGRAM)
        for found in IMPORTED.finditer(part)
    ]
    findings.extend([*launched, *left, *useless_installs(part, line), *variables, *paths, *programs])
    return port_installs(ported)


def port_dockerfile(text: str) -> tuple[str, list[Finding]]:
    """Return a Dockerfile with launch layers and installed packages rewritten, and findings for the rest."""
    ported, findings = port_shell(text)
    for found in _IMAGE.finditer(text):
        reason = f"{found.group(1)} brings Determined's environment, with an old torch"
        advice = "build on an image with Python 3.10 or later, and let pip install det-lightning, which brings torch"
        findings.append(Finding(line_at(text, found.start(1)), Severity.check, reason, advice))
    return ported, findings


def port_startup_hook(text: str) -> tuple[str, list[Finding]]:
    """Port ``startup-hook.sh`` like :func:`port_shell`; one finding for the whole file, unless a comment accepts it.

    Determined ran the hook in the container of a trial; ``det-lightning run`` runs the hook on the machine.
    """
    ported, findings = port_shell(text)
    return ported, findings if is_accepted(text) else [*findings, Finding(0, Severity.check, _RUNS_HERE, _INSTALL_ONCE)]
