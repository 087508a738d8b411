"""Shell scripts, Makefiles and Dockerfiles, ported."""

from __future__ import annotations

import re

from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.launchers import port_commands
from det_lightning.porting.requirements import port_installs, useless_installs

_COMMENT = re.compile(r"^[ \t]*#[^\n]*\n?", re.MULTILINE)
_CLI = re.compile(
    r"(?:^|[\s;&|(`@])(det(?:\s+-\w+\s+\S+)*\s+(?:a|agent|checkpoint|c|cmd|command|deploy|dev|e|experiment|job|m|master|"
    r"model|notebook|preview-search|project|resources?|rp|shell|slot|s|t|task|template|tensorboard|trial|tpl|u|user|"
    r"version|w|workspace)\s+[\w-]+)",
    re.MULTILINE,
)
_IMAGE = re.compile(r"^\s*(?:FROM\s+(?:--\S+\s+)*|ARG\s+\w+=)(\S*determinedai/\S+)", re.MULTILINE | re.IGNORECASE)


def port_shell(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return shell commands with launch layers and installed packages rewritten, and what could not be.

    Args:
        text: the commands; whole lines of comment stay as they are.
        first_line: number of the line that the text begins with.
    """
    parts = []
    findings = []
    position = 0
    for comment in [*_COMMENT.finditer(text), None]:
        end = len(text) if comment is None else comment.start()
        line = first_line + text.count("\n", 0, position)
        ported, found = _port_part(text[position:end], line)
        findings += found
        parts += [ported, "" if comment is None else comment.group()]
        position = end if comment is None else comment.end()
    return "".join(parts), findings


def _port_part(text: str, first_line: int) -> tuple[str, list[Finding]]:
    ported, findings = port_commands(text, first_line)
    for found in _CLI.finditer(text):
        line = first_line + text.count("\n", 0, found.start(1))
        reason = f"{' '.join(found.group(1).split())}: it asks a Determined master"
        advice = "start the training script itself, or with python -m det_lightning.launch.torch_distributed"
        findings.append(Finding(line, Severity.problem, reason, advice))
    return port_installs(ported), findings + useless_installs(text, first_line)


def port_dockerfile(text: str) -> tuple[str, list[Finding]]:
    """Return a Dockerfile with launch layers and installed packages rewritten, and what could not be."""
    ported, findings = port_shell(text)
    for found in _IMAGE.finditer(text):
        line = 1 + text.count("\n", 0, found.start(1))
        reason = f"{found.group(1)} brings Determined's environment, with an old torch"
        advice = "build on an image with Python 3.10 or later, and let pip install det-lightning, which brings torch"
        findings.append(Finding(line, Severity.check, reason, advice))
    return ported, findings
