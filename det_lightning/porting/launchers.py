"""Launch layers: ``python -m determined.launch.<module>``, wherever such a command is written."""

from __future__ import annotations

import re

from det_lightning.porting.counterparts import counterpart
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.missing_parts import missing_launcher

_AUTO = ("det_lightning.launch.horovod", "--autohorovod")
# After -m, in a command line, or in a list of quoted words; the quote is that before the module's name.
_LAUNCH = re.compile(r"(-m[\"']?(?:\s*,\s*|\s+)([\"']?))determined\.launch\.(\w+)(?![\w.])")
_RUN_INSIDE = re.compile(
    r"-m[\"']?(?:\s*,\s*|\s+)[\"']?(determined\.(?:exec|cli|deploy)[\w.]*)"
    r"(?:[\"'\s,\\]+(?:--trial[\"'\s,]+)?([A-Za-z_][\w.]*:[A-Za-z_]\w*)(?=[\"'\s]|$))?"
)
_TRIAL = re.compile(
    r"(?:determined|det_lightning)\.launch\.(?:torch_distributed|\w*horovod)\b[^#;]{0,200}?"
    r"\s[\"']?(?:--trial[\"'\s,=]+)?(--trial\b|[A-Za-z_][\w.]*:[A-Za-z_]\w*(?=[\"'\s]|$))"
)


def launcher_counterpart(module: str) -> tuple[str, ...] | None:
    """Return the words that replace ``determined.launch.<module>`` after ``-m``; None if nothing does."""
    if module in ("autohorovod", "auto_horovod"):
        return _AUTO
    ours = counterpart(f"determined.launch.{module}")
    return None if ours is None else (ours,)


def port_commands(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return a text with the launch layers of its commands rewritten, and what could not be.

    Args:
        text: shell commands, or any text that holds such.
        first_line: number of the line that it begins with.
    """
    findings = []

    def note(start: int, finding: Finding) -> None:
        line = first_line + text.count("\n", 0, start)
        findings.append(Finding(line, finding.severity, finding.reason, finding.advice))

    def replaced(match: re.Match[str]) -> str:
        before, quote, module = match.groups()
        words = launcher_counterpart(module)
        if words is None:
            note(match.start(3), missing_launcher(module, 0))
            return match.group()
        return before + (f"{quote}, {quote}" if quote else " ").join(words)

    for found in _TRIAL.finditer(text):
        note(found.start(1), runs_a_class(found.group(1), 0))
    for found in _RUN_INSIDE.finditer(text):
        module, trial = found.groups()
        if trial is not None:
            note(found.start(2), runs_a_class(trial, 0))
        else:
            note(found.start(1), Finding(0, Severity.problem, f"{module}: it needs a Determined master", "remove it"))
    return _LAUNCH.sub(replaced, text), findings


def trial_class_in(words: list[str]) -> str | None:
    """Return the class of a trial that a command, given as words, has a launcher run; None if there is none."""
    command = " ".join(words)
    found = _TRIAL.search(command), _RUN_INSIDE.search(command)
    return (found[0] and found[0].group(1)) or (found[1] and found[1].group(2)) or None


def runs_a_class(given: str, line: int) -> Finding:
    """Return the finding for a command that has a launcher run the class of a trial."""
    return Finding(
        line,
        Severity.problem,
        f"{given}: the launchers of det_lightning run scripts, not classes",
        "write a script that calls det_lightning.pytorch.init() and Trainer(...).fit(...), and run it here",
    )
