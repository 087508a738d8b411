"""Environment variables that Determined sets for a task, but ``det-lightning run`` does not."""

from __future__ import annotations

import re

import libcst as cst

from det_lightning.porting.findings import Finding, Premise, Severity, line_at
from det_lightning.porting.python_syntax import PythonFile, string_of

#: What ``det-lightning run`` sets for the processes of a trial; DET_CHIEF_IP is set by its launcher.
SET_BY_RUN = {
    "DET_EXPERIMENT_CONFIG", "DET_EXPERIMENT_ID", "DET_HPARAMS", "DET_LATEST_CHECKPOINT", "DET_SLOT_IDS",
    "DET_STEPS_COMPLETED", "DET_TASK_TYPE", "DET_TRIAL_ID", "DET_TRIAL_RUN_ID", "DET_TRIAL_SEED",
}  # fmt: skip
#: What a project may set for Determined's own tools, which has no effect here.
_READ_BY_DETERMINED = {
    "DET_MASTER", "DET_MASTER_ADDR", "DET_MASTER_CERT_FILE", "DET_MASTER_CERT_NAME", "DET_MASTER_PORT", "DET_PASS",
    "DET_SESSION_TOKEN", "DET_USER", "DET_USER_TOKEN",
}  # fmt: skip
_READ_HERE = SET_BY_RUN | {"DET_CHIEF_IP"}
_VARIABLE = re.compile(r"(?<![\w.-])DET_(?!LIGHTNING_)[A-Z][A-Z0-9_]*(?!\w)")
_ADVICE = "remove it, or set it yourself, as in environment.environment_variables"


def note_variables(text: str, first_line: int = 1) -> list[Finding]:
    """Return a finding for each variable of Determined in a text that ``det-lightning run`` does not set."""
    return [
        _not_set(found.group(), line_at(text, found.start(), first_line))
        for found in _VARIABLE.finditer(text)
        if found.group() not in _READ_HERE
    ]


def note_python_variables(file: PythonFile) -> None:
    """Note the variables of Determined that Python code names in a string of its own."""
    for node in file.find(cst.SimpleString):
        value = string_of(node) or ""
        if _VARIABLE.fullmatch(value) and value not in _READ_HERE:
            file.findings.append(_not_set(value, file.line(node)))


def _not_set(name: str, line: int) -> Finding:
    premise = Premise.nothing if name in _READ_BY_DETERMINED else Premise.variable_unset
    reason = f"{name}: det-lightning run does not set it"
    return Finding(line, Severity.check, reason, _ADVICE, premise=premise)
