"""Explains a failed run by a missing hyperparameter, configuration or argument."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.testing.checks import BadTrial
from det_lightning.testing.observation.source_scan import TrialCode
from det_lightning.testing.recorder import needs_hparams
from det_lightning.testing.records.record import RunSettings
from det_lightning.testing.training.execution import Failure
from det_lightning.testing.training.trial_source import TrialSource, is_own_file

_MISSING = ("There is no hyperparameter", "This trial has no hparams", "The batch size is unknown")


def read_code(source: TrialSource) -> TrialCode:
    """Import the trial, and return the source of the trial's own modules."""
    with source.import_class():
        files = [getattr(module, "__file__", None) for module in source.modules()]
    own = [Path(file) for file in files if isinstance(file, str) and is_own_file(file, source.directory)]
    return TrialCode(own, source.directory)


def choose_arguments(source: TrialSource, hparams: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor's arguments beyond the context, with the hyperparameters if ``hparams`` is required."""
    if not hparams or "hparams" in given:
        return given
    try:
        with source.import_class() as trial_class:
            return {**given, "hparams": dict(hparams)} if needs_hparams(trial_class) else given
    except (BadTrial, TypeError, ValueError):  # the first run reports the reason
        return given


def explain_failure(source: TrialSource, settings: RunSettings, failure: Failure) -> str | None:
    """Return an explanation if a run failed because the trial lacks something; else None."""
    error = failure.error
    text = str(error)
    if isinstance(error, errors.InvalidHP):
        given = ", ".join(f"{hparam}={value!r}" for hparam, value in settings.hparams.items())
        return (
            f"{source.name} refuses its hyperparameters {failure.stage}, with InvalidHP: {text}\nThey are {given} "
            f"(of each range the middle); pass others with --trial-hparams.\n{failure.text}"
        )
    if isinstance(error, ValueError) and "no experiment configuration" in text:
        return f"{source.name} needs its experiment configuration; pass --trial-config FILE.\n{failure.text}"
    if isinstance(error, TypeError) and "__init__()" in text and failure.stage == "while the trial is built":
        with source.import_class() as trial_class:
            return _explain_arguments(source.name, trial_class, settings, text)
    if isinstance(error, ValueError) and text.startswith(_MISSING):
        return _explain_hparams(source, settings, re.findall(r"hyperparameter '([^']+)'", text))
    if isinstance(error, KeyError) and error.args and error.args[0] in read_code(source).find_hparams():
        return _explain_hparams(source, settings, [str(error.args[0])])
    return None


def _explain_arguments(name: str, trial_class: type, settings: RunSettings, text: str) -> str | None:
    parameters = list(inspect.signature(trial_class.__init__).parameters.values())[2:]  # type: ignore[misc]
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if needed := [p.name for p in plain if p.default is p.empty and p.name not in settings.arguments]:
        return (
            f"{name} needs arguments beyond its context: {', '.join(needed)}. Pass them with --trial-kwargs "
            f"'{_make_example(needed)}'; for values that JSON lacks, check a subclass whose __init__(self, context) "
            "passes them."
        )
    if unknown := sorted(settings.arguments.keys() - {p.name for p in plain}):
        return f"{name} takes no argument {', '.join(unknown)}, which --trial-kwargs has ({text})."
    return None


def _explain_hparams(source: TrialSource, settings: RunSettings, requested: list[str]) -> str | None:
    """Return all hyperparameters that the code names and the settings lack, with ``requested``, or None if none."""
    lines = read_code(source).find_hparams()
    missing = [name for name in dict.fromkeys([*lines, *requested]) if name not in settings.hparams]
    if not missing:
        return None
    named = "\n".join(f"  - {name}" + (f" ({lines[name]})" if name in lines else "") for name in missing)
    return (
        f"{source.name} needs hyperparameters that were not passed (passed: "
        f"{', '.join(sorted(settings.hparams)) or 'none'}):\n{named}\n"
        f"Add them to the hyperparameters of --trial-config, or pass --trial-hparams '{_make_example(missing)}'."
    )


def _make_example(names: list[str]) -> str:
    return "{" + ", ".join(f'"{name}": ...' for name in names) + "}"
