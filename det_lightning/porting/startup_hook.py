"""``startup-hook.sh``, which Determined runs in the container of a trial and ``det-lightning run`` on the machine."""

from __future__ import annotations

import re

from det_lightning.porting.commands import port_shell
from det_lightning.porting.findings import Finding, Severity, line_at

_INSTALL = re.compile(
    r"^[^#\n]*?\b(?:(?P<tool>pip3?|conda|mamba|apt|apt-get|yum|dnf|apk)\s+(?:-\S+\s+)*(?:install|add))\b", re.MULTILINE
)
_ADVICE = (
    "install the packages once, in a virtual environment of the project, and remove such lines: pip may replace torch "
    "itself by another release"
)


def port_startup_hook(text: str) -> tuple[str, list[Finding]]:
    """Return a start-up hook as ``port_shell`` does, with one finding if it installs packages."""
    ported, findings = port_shell(text)
    found = _INSTALL.search(text)
    if found is not None:
        reason = f"{found['tool']} installs here, without a container, whenever det-lightning run starts a trial"
        findings.append(Finding(line_at(text, found.start("tool")), Severity.check, reason, _ADVICE))
    return ported, findings
