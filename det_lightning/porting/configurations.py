"""What ``det-lightning run`` does with the fields of an experiment configuration."""

from __future__ import annotations

from det_lightning.config import FieldEffect, field_effects, read_config
from det_lightning.config.environment import Images
from det_lightning.errors import ConfigError
from det_lightning.porting.findings import Finding, Severity

# The porting tool has advice of its own for these.
_ELSEWHERE = {"optimizations.mixed_precision"}
_INSTALL = "install what the code needs of the image before the run, in a virtual environment of the project"
_SEVERITIES: dict[str, Severity] = {"ignored": Severity.note, "warned": Severity.check}


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
        if field.path == "environment.image" and not _is_of_determined(config.environment.image):
            findings.append(_without_effect(field, Severity.check, _INSTALL))
        elif field.effect in _SEVERITIES and field.path not in _ELSEWHERE:
            findings.append(_without_effect(field, _SEVERITIES[field.effect], field.note.rstrip(".")))
    return findings


def _without_effect(field: FieldEffect, severity: Severity, advice: str) -> Finding:
    return Finding(field.line or 0, severity, f"{field.path} has no effect under det-lightning run", advice)


def _is_of_determined(image: Images) -> bool:
    """Return whether images are those of Determined's environments, of which a trial needs nothing but torch."""
    names = [name for name in (image.cpu, image.cuda, image.rocm) if name]
    return all("determinedai/" in name for name in names)


def class_that_run_trains(text: str) -> str | None:
    """Return the trial class that the entrypoint of a configuration names or has a launcher run, if it does."""
    try:
        return read_config(f"{text}\n", partial=True).trial_class
    except ConfigError:
        return None
