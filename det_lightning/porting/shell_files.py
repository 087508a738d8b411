"""Shell scripts, startup hooks and Dockerfiles."""

from __future__ import annotations

import dataclasses
import re

import libcst as cst

from det_lightning.porting.commands import note_container_paths, note_variables, port_commands
from det_lightning.porting.det_program import port_det_commands
from det_lightning.porting.embedded_python import EXPANDED, port_parts
from det_lightning.porting.findings import Finding, Need, Premise, Severity, line_at
from det_lightning.porting.python_files import port_python
from det_lightning.porting.requirements import port_installs, useless_installs
from det_lightning.startup_hook import is_accepted

# For a hook that no comment accepts.
_RUNS_HERE = "it runs in your own environment, not in a container; det-lightning run asks for --hook run or --hook skip"
_INSTALL_ONCE = (
    "install its packages once, in a virtual environment, and start with --hook skip; or accept the hook with the "
    "comment `# det-lightning: ok` in it: pip may replace torch itself by another release"
)
_IMAGE = re.compile(r"^[ \t]*(?:FROM\s+(?:--\S+\s+)*|ARG\s+\w+=)(\S*determinedai/\S+)", re.MULTILINE | re.IGNORECASE)


def port_shell(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return shell commands with launch layers, packages and Python code rewritten, and findings for the rest.

    Comments stay.
    """
    findings: list[Finding] = []

    def port_code(code: str, line: int) -> str:
        ported, left = _port_code(code)
        findings.extend(dataclasses.replace(finding, line=finding.line + line - 1) for finding in left)
        return ported

    def port_part(part: str, line: int) -> str:
        ported, launched = port_commands(part, line)
        ported, left = port_det_commands(ported, line)
        # Variables in translated commands of det are gone.
        variables = [found for found in note_variables(part, line) if found.reason.partition(":")[0] in ported]
        paths = note_container_paths(part, line)
        findings.extend([*launched, *left, *useless_installs(part, line), *variables, *paths])
        return port_installs(ported)

    return port_parts(text, port_part, port_code, first_line), findings


def _port_code(code: str) -> tuple[str, list[Finding]]:
    """Return a Python program in a script ported, or unchanged if it cannot be read."""
    try:
        ported, findings = port_python(code)
    except cst.ParserSyntaxError:
        return code, _not_read(code)
    if any(EXPANDED in finding.reason for finding in findings):
        return code, _not_read(code)
    # A command is no part of a trial.
    return ported, [found for found in findings if found.premise not in (Premise.in_trial, Premise.outside_trial)]


def _not_read(code: str) -> list[Finding]:
    if "determined" not in code:
        return []
    reason = "not ported: Python put together by the shell"
    return [Finding(1, Severity.problem, reason, "port the code by hand, or keep it in a separate file", Need.file)]


def port_dockerfile(text: str) -> tuple[str, list[Finding]]:
    """Return a Dockerfile with launch layers and installed packages rewritten, and findings for the rest."""
    ported, findings = port_shell(text)
    for found in _IMAGE.finditer(text):
        reason = f"{found.group(1)} brings Determined's environment, with an old torch"
        advice = "build on an image with Python 3.10 or later, and let pip install det-lightning, which brings torch"
        findings.append(Finding(line_at(text, found.start(1)), Severity.check, reason, advice))
    return ported, findings


def port_startup_hook(text: str) -> tuple[str, list[Finding]]:
    """Return ``startup-hook.sh`` as :func:`port_shell` does, with a finding for the whole, unless a comment accepts it.

    Determined ran the hook in the container of a trial; ``det-lightning run`` runs the hook on the machine.
    """
    ported, findings = port_shell(text)
    return ported, findings if is_accepted(text) else [*findings, Finding(0, Severity.check, _RUNS_HERE, _INSTALL_ONCE)]
