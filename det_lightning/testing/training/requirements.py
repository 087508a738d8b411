"""What a trial needs but was not given: hyperparameters, a configuration, arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.masking import mask
from det_lightning.pytorch._random_state import isolated_rng
from det_lightning.pytorch._trainer import init
from det_lightning.testing.checks import BadTrial
from det_lightning.testing.observation.source_scan import hparams_in, lines_in
from det_lightning.testing.recorder import needs_hparams
from det_lightning.testing.records.record import RunSettings
from det_lightning.testing.training.execution import Failure, cause_of_exit
from det_lightning.testing.training.trial_source import TrialSource, is_own_file

_LISTED = 8
_MISSING = ("There is no hyperparameter", "This trial has no hparams", "The batch size is not known")


def arguments_of(source: TrialSource, hparams: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the constructor beyond the context, with the hyperparameters if it needs ``hparams``."""
    if not hparams or "hparams" in given:
        return given
    try:
        with source.imported() as trial_class:
            return {**given, "hparams": dict(hparams)} if needs_hparams(trial_class) else given
    except (BadTrial, TypeError, ValueError):  # the first run reports the reason
        return given


class _RequestedHparams(dict[str, Any]):
    """Hyperparameters that are added with the value 1 when they are requested but missing."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        return self.setdefault(name, 1)


def explain_failure(source: TrialSource, settings: RunSettings, failure: Failure) -> str | None:
    """Return what the trial lacks, if that is why a run failed; else None."""
    error = failure.error
    text = str(error)
    if isinstance(error, errors.InvalidHP):
        given = ", ".join(f"{hparam}={value!r}" for hparam, value in mask(settings.hparams).items())
        return (
            f"{source.name} refuses its hyperparameters {failure.stage}, with InvalidHP: {text}\nThey are {given} "
            f"(of each range the middle); pass others with --trial-hparams.\n{failure.text}"
        )
    if isinstance(error, ValueError) and "no experiment configuration" in text:
        return f"{source.name} needs its experiment configuration; pass --trial-config FILE.\n{failure.text}"
    if isinstance(error, TypeError) and "__init__()" in text and failure.stage == "while the trial is built":
        with source.imported() as trial_class:
            return _wrong_arguments(source.name, trial_class, settings, text)
    if isinstance(error, ValueError) and text.startswith(_MISSING):
        return _missing_hparams(source, settings, None)
    if isinstance(error, KeyError) and error.args and error.args[0] not in settings.hparams:
        return _missing_hparams(source, settings, str(error.args[0]))
    return None


def _wrong_arguments(name: str, trial_class: type, settings: RunSettings, text: str) -> str | None:
    parameters = list(inspect.signature(trial_class.__init__).parameters.values())[2:]  # type: ignore[misc]
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if needed := [p.name for p in plain if p.default is p.empty and p.name not in settings.arguments]:
        return (
            f"{name} needs arguments beyond its context: {', '.join(needed)}. Pass them with --trial-kwargs "
            f"'{_example(needed)}'; if they cannot be JSON, check a subclass whose __init__(self, context) passes them."
        )
    if unknown := sorted(settings.arguments.keys() - {p.name for p in plain}):
        return f"{name} takes no argument {', '.join(unknown)}, which --trial-kwargs has ({text})."
    return None


def _missing_hparams(source: TrialSource, settings: RunSettings, suspected: str | None) -> str | None:
    size = {"global_batch_size": 2}
    hparams = _RequestedHparams({**size, **settings.hparams})
    with source.imported() as trial_class, isolated_rng():
        problem = _build_all(trial_class, settings, hparams)
        lines = hparams_in(files_of(source), source.directory)
    names = [*(name for name in hparams if name not in size), *(name for name in size if name in lines)]
    requested = [name for name in names if name not in settings.hparams]
    if not requested or (suspected is not None and suspected not in requested):
        return None
    missing = [*requested, *(name for name in lines if name not in requested and name not in settings.hparams)]
    named = "\n".join(f"  - {name}" + (f" ({lines[name]})" if name in lines else "") for name in missing)
    more = f"\nThere may be more: with each of them set to 1 it fails with {problem}." if problem else ""
    return (
        f"{source.name} needs hyperparameters that were not passed (passed: "
        f"{', '.join(sorted(settings.hparams)) or 'none'}):\n{named}\n"
        f"Add them to the hyperparameters of --trial-config, or pass --trial-hparams '{_example(missing)}'.{more}"
    )


def _example(names: list[str]) -> str:
    return "{" + ", ".join(f'"{name}": ...' for name in names) + "}"


def _build_all(trial_class: type, settings: RunSettings, hparams: _RequestedHparams) -> str:
    try:
        with init(hparams=hparams, exp_conf=settings.config, enable_tensorboard_logging=False) as context:
            trial = trial_class(context, **settings.arguments)
            for build in ("build_training_data_loader", "build_validation_data_loader", "build_callbacks"):
                getattr(trial, build)()
    except (Exception, errors.InvalidExperimentException, SystemExit) as e:  # a wrong value may lead to any error
        error = cause_of_exit(e)
        return f"{type(error).__name__}: {error}"
    return ""


def files_of(source: TrialSource) -> list[Path]:
    """Return the files of the trial's own code; only within a block of ``source.imported()``."""
    files = [getattr(module, "__file__", None) for module in source.modules()]
    return [Path(file) for file in files if isinstance(file, str) and is_own_file(file, source.directory)]


def find_lines(source: TrialSource, is_found: Callable[[ast.expr], bool]) -> list[str]:
    """Return the first expressions of the trial's code for which ``is_found`` is true, as ``"file:line: code"``."""
    with source.imported():
        return lines_in(files_of(source), source.directory, is_found)[:_LISTED]
