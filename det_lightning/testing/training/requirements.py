"""What a trial asks for and was not given: hyperparameters, a configuration, arguments."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.pytorch.random_state import isolated_rng
from det_lightning.pytorch.trainer import init
from det_lightning.testing.observation.source_scan import hparams_in
from det_lightning.testing.outcomes import BadTrial
from det_lightning.testing.own_code import is_own_file
from det_lightning.testing.records.record import RunSettings
from det_lightning.testing.training.execution import Failure
from det_lightning.testing.training.trial_source import TrialSource

__all__ = ["AskedHparams", "arguments_of", "explain_failure", "files_of"]

_MESSAGES = ("There is no hyperparameter", "This trial has no hparams", "The batch size is not known")


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
    except (BadTrial, TypeError, ValueError):  # the first run tells what is wrong
        return given
    return given if asked is None or asked.default is not asked.empty else {**given, "hparams": dict(hparams)}


class AskedHparams(dict[str, Any]):
    """Hyperparameters that answer 1 for what they do not have, and remember who asked."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.missing: dict[str, None] = {}

    def __contains__(self, name: object) -> bool:
        """Say yes to everything."""
        return True

    def __missing__(self, name: str) -> int:
        self.missing[name] = None
        return 1


def explain_failure(source: TrialSource, settings: RunSettings, failure: Failure) -> str | None:
    """Return what the trial needs and was not given, if that is why a run failed; else None."""
    error, name = failure.error, source.name
    text = str(error)
    if isinstance(error, errors.InvalidHP):
        given = ", ".join(f"{hparam}={value!r}" for hparam, value in settings.hparams.items())
        return (
            f"{name} refuses its hyperparameters {failure.stage}, with InvalidHP: {text}\nThey are {given}. Of a range "
            f"the middle was taken; pass others with --trial-hparams.\n{failure.text}"
        )
    if isinstance(error, ValueError) and "no experiment configuration" in text:
        return f"{name} asks for its experiment configuration; give --trial-config FILE.\n{failure.text}"
    if isinstance(error, TypeError) and "__init__()" in text and failure.stage == "while the trial is built":
        with source.imported() as trial_class:
            return _arguments(name, trial_class, settings, text)
    missing = isinstance(error, ValueError) and text.startswith(_MESSAGES)
    if missing or (isinstance(error, KeyError) and error.args and error.args[0] not in settings.hparams):
        return _missing_hparams(source, settings, failure, certain=missing)
    return None


def _arguments(name: str, trial_class: type, settings: RunSettings, text: str) -> str | None:
    parameters = list(inspect.signature(trial_class.__init__).parameters.values())[2:]  # type: ignore[misc]
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in plain if p.default is p.empty and p.name not in settings.arguments]
    unknown = sorted(settings.arguments.keys() - {p.name for p in plain})
    if not needed and not unknown:
        return None
    if not needed:
        return f"{name} takes no argument {', '.join(unknown)}, which --trial-kwargs gives ({text})."
    example = "{" + ", ".join(f'"{argument}": ...' for argument in needed) + "}"
    return (
        f"{name} needs arguments beyond its context: {', '.join(needed)}. Pass them with --trial-kwargs '{example}'; "
        "where they are no JSON, name a subclass instead whose __init__(self, context) gives them."
    )


def _missing_hparams(source: TrialSource, settings: RunSettings, failure: Failure, certain: bool) -> str | None:
    asked, broke = _ask(source, settings)
    if not asked:
        return None
    if not certain and str(failure.error.args[0]) not in asked:
        return None
    with source.imported():
        lines = hparams_in(files_of(source), source.directory)
    missing = [*asked, *(name for name in lines if name not in asked and name not in settings.hparams)]
    named = "\n".join(f"  - {name}" + (f" ({lines[name]})" if name in lines else "") for name in missing)
    example = "{" + ", ".join(f'"{name}": ...' for name in missing) + "}"
    more = f"\nThere may be more: with 1 for each of them it then fails with {broke}." if broke else ""
    given = ", ".join(sorted(settings.hparams)) or "none"
    return (
        f"{source.name} asks for hyperparameters that it was not given (given: {given}):\n{named}\n"
        f"Add them to the hyperparameters of --trial-config, or pass --trial-hparams '{example}'.{more}"
    )


def _ask(source: TrialSource, settings: RunSettings) -> tuple[list[str], str]:
    """Return the hyperparameters that the trial asks for in vain, and what goes wrong when each of them is 1."""
    given: dict[str, Any] = dict(settings.hparams)
    hparams = AskedHparams({"global_batch_size": 2, **given})
    with source.imported() as trial_class, isolated_rng():
        broke = _build_all(trial_class, settings, hparams)
        in_source = hparams_in(files_of(source), source.directory)
    needs_size = "global_batch_size" in in_source and "global_batch_size" not in given
    return [*hparams.missing, *(["global_batch_size"] if needs_size else [])], broke


def _build_all(trial_class: type, settings: RunSettings, hparams: AskedHparams) -> str:
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
    directory = source.directory
    files = [getattr(module, "__file__", None) for module in source.modules()]
    return [Path(file) for file in files if isinstance(file, str) and is_own_file(file, directory)]
