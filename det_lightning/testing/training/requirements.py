"""What a trial asks for and was not given: hyperparameters, a configuration, arguments."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.masking import mask
from det_lightning.pytorch._random_state import isolated_rng
from det_lightning.pytorch._trainer import init
from det_lightning.testing.observation.source_scan import hparams_in
from det_lightning.testing.outcomes import BadTrial
from det_lightning.testing.own_code import is_own_file
from det_lightning.testing.records.record import RunSettings
from det_lightning.testing.training.execution import Failure
from det_lightning.testing.training.trial_source import TrialSource

_MISSING = ("There is no hyperparameter", "This trial has no hparams", "The batch size is not known")


def arguments_of(source: TrialSource, hparams: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trial's constructor beyond the context.

    They are those that were given, and the hyperparameters where it needs an argument ``hparams``: scripts for
    Determined's ``init()`` pass them so.
    """
    if not hparams or "hparams" in given:
        return given
    try:
        with source.imported() as trial_class:
            asked = inspect.signature(trial_class.__init__).parameters.get("hparams")  # type: ignore[misc]
    except (BadTrial, TypeError, ValueError):  # the first run shows what is wrong
        return given
    return given if asked is None or asked.default is not asked.empty else {**given, "hparams": dict(hparams)}


class _AskedHparams(dict[str, Any]):
    """Hyperparameters that answer 1 for what they do not have, and remember what was asked for."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.missing: dict[str, None] = {}

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> int:
        self.missing[name] = None
        return 1


def explain_failure(source: TrialSource, settings: RunSettings, failure: Failure) -> str | None:
    """Return what the trial needs and was not given, if that is why a run failed; else None."""
    error = failure.error
    text = str(error)
    if isinstance(error, errors.InvalidHP):
        given = ", ".join(f"{hparam}={value!r}" for hparam, value in mask(settings.hparams).items())
        return (
            f"{source.name} refuses its hyperparameters {failure.stage}, with InvalidHP: {text}\nThey are {given}. Of "
            f"a range the middle was taken; pass others with --trial-hparams.\n{failure.text}"
        )
    if isinstance(error, ValueError) and "no experiment configuration" in text:
        return f"{source.name} asks for its experiment configuration; give --trial-config FILE.\n{failure.text}"
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
    needed = [p.name for p in plain if p.default is p.empty and p.name not in settings.arguments]
    unknown = sorted(settings.arguments.keys() - {p.name for p in plain})
    if needed:
        example = "{" + ", ".join(f'"{argument}": ...' for argument in needed) + "}"
        return (
            f"{name} needs arguments beyond its context: {', '.join(needed)}. Pass them with --trial-kwargs "
            f"'{example}'; where they cannot be JSON, name a subclass instead whose __init__(self, context) gives them."
        )
    if unknown:
        return f"{name} takes no argument {', '.join(unknown)}, which --trial-kwargs gives ({text})."
    return None


def _missing_hparams(source: TrialSource, settings: RunSettings, suspected: str | None) -> str | None:
    """Return which hyperparameters are missing; None if none is, or the suspected one is not among them."""
    hparams = _AskedHparams({"global_batch_size": 2, **settings.hparams})
    with source.imported() as trial_class, isolated_rng():
        problem = _build_all(trial_class, settings, hparams)
        lines = hparams_in(files_of(source), source.directory)
    asked = list(hparams.missing)
    if "global_batch_size" in lines and "global_batch_size" not in settings.hparams:
        asked.append("global_batch_size")
    if not asked or (suspected is not None and suspected not in asked):
        return None
    missing = [*asked, *(name for name in lines if name not in asked and name not in settings.hparams)]
    named = "\n".join(f"  - {name}" + (f" ({lines[name]})" if name in lines else "") for name in missing)
    example = "{" + ", ".join(f'"{name}": ...' for name in missing) + "}"
    more = f"\nThere may be more: with 1 for each of them it then fails with {problem}." if problem else ""
    return (
        f"{source.name} asks for hyperparameters that it was not given (given: "
        f"{', '.join(sorted(settings.hparams)) or 'none'}):\n{named}\n"
        f"Add them to the hyperparameters of --trial-config, or pass --trial-hparams '{example}'.{more}"
    )


def _build_all(trial_class: type, settings: RunSettings, hparams: _AskedHparams) -> str:
    """Build the trial, its loaders and its callbacks; return what went wrong, in words."""
    try:
        with init(hparams=hparams, exp_conf=settings.config, enable_tensorboard_logging=False) as context:
            trial = trial_class(context, **settings.arguments)
            for build in ("build_training_data_loader", "build_validation_data_loader", "build_callbacks"):
                getattr(trial, build)()
    except (Exception, errors.InvalidExperimentException, SystemExit) as e:  # whatever a wrong value leads to
        return f"{type(e).__name__}: {e}"
    return ""


def files_of(source: TrialSource) -> list[Path]:
    """Return the files of the trial's own code; inside of a block of ``source.imported()``."""
    files = [getattr(module, "__file__", None) for module in source.modules()]
    return [Path(file) for file in files if isinstance(file, str) and is_own_file(file, source.directory)]
