"""What ``det-lightning run`` does with the fields of an experiment configuration."""

from __future__ import annotations

from det_lightning.config import field_effects, read_config
from det_lightning.errors import ConfigError
from det_lightning.porting.findings import Finding, Severity

# The porting tool has advice of its own for these.
_ELSEWHERE = {"optimizations.mixed_precision"}
_SEVERITIES = {"ignored": Severity.note, "warned": Severity.check}


def findings_of_run(text: str) -> list[Finding]:
    """Return a finding for each field of a configuration that is refused, ignored, or read differently."""
    try:
        config = read_config(f"{text}\n", partial=True)
    except ConfigError as e:
        advice = "change it: det-lightning run refuses the file"
        mistakes = [(m.line or 0, ": ".join(part for part in (m.path, m.message) if part)) for m in e.mistakes]
        return [Finding(line, Severity.problem, reason, advice) for line, reason in mistakes]
    findings = [
        Finding(note.line or 0, Severity.note, f"{note.path}: {note.message}", "leave it; det-lightning run says so")
        for note in config.notes
    ]
    for field in field_effects(config):
        severity = _SEVERITIES.get(field.effect)
        if severity is not None and field.path not in _ELSEWHERE:
            reason = f"{field.path} has no effect under det-lightning run"
            findings.append(Finding(field.line or 0, severity, reason, field.note.rstrip(".")))
    return findings


def class_that_run_trains(text: str) -> str | None:
    """Return the trial class that the entrypoint of a configuration names or has a launcher run, if it does."""
    try:
        return read_config(f"{text}\n", partial=True).trial_class
    except ConfigError:
        return None
