"""Checks of an old checkpoint: the trial resumes, and a validation gives the recorded metrics."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint import CheckpointContent, load_checkpoint, open_checkpoint
from det_lightning.checkpoint.format.layout import METADATA_FILE
from det_lightning.core._reports import select_scalars
from det_lightning.testing.checks import CheckFailed, NotCompared
from det_lightning.testing.training.execution import train, validate
from det_lightning.testing.training.trainings import TrialRuns

# Other releases of torch and other devices sum in another order.
_TOLERANCE = 1e-3


def loads(runs: TrialRuns) -> None:
    """The trial resumes from the checkpoint and trains a batch: weights, optimizers, schedulers and callbacks fit."""
    path, content, _ = _read_checkpoint(runs)
    plan = runs.plan(
        "the resumed run",
        dataclasses.replace(runs.settings, batches=content.trial_state.batches_trained + 1),
        validate_after=frozenset(),
        limits={"limit_val_batches": 1},
        resume_from=path,
    )
    failure = train(runs.source, plan).failure
    if failure is not None:
        raise CheckFailed(
            f"The trial cannot resume from {path}: it fails {failure.description}",
            "other hyperparameters than in the training",
            "a model that has changed since",
        )


def reproduces_metrics(runs: TrialRuns) -> None:
    """A validation with the checkpoint's weights, on all validation data, gives the recorded metrics."""
    path, _, metadata = _read_checkpoint(runs)
    validated = validate(runs.source, runs.plan("the validation", resume_from=path))
    if validated.failure is not None:
        raise CheckFailed(f"{path} cannot be validated: the trial fails {validated.failure.description}")
    validations = validated.observer.validations
    measured = select_scalars(validations[-1][1]) if validations else {}
    metric = metadata.get("metric")
    recorded = runs.options.metrics
    if not recorded and isinstance(metric, dict) and {"name", "value"} <= metric.keys():
        recorded = select_scalars({metric["name"]: metric["value"]})
    if not recorded:
        raise NotCompared(
            f"{path} does not have its validation metrics (metadata.json has none); pass them with --trial-metrics. "
            f"The validation here gives {', '.join(f'{name} {value:.6g}' for name, value in measured.items())}"
        )
    tolerance = runs.options.tolerance if runs.options.tolerance is not None else _TOLERANCE
    for name, value in recorded.items():
        if name not in measured:
            raise CheckFailed(
                f"The checkpoint has validation metric {name!r}; the validation gives {', '.join(measured)}.",
                "a metric that has been renamed since",
            )
        apart = abs(measured[name] - value)
        if not apart <= tolerance * max(abs(measured[name]), abs(value)) + 1e-6:
            raise CheckFailed(
                f"validation metric {name!r} was {value:.9g} when the checkpoint was written, and is "
                f"{measured[name]:.9g} now, {apart:.3g} apart (allowed: {tolerance:g} of the value).",
                "other validation data, or another preprocessing of them",
                "a model in training mode while it validates, or state that is not in the checkpoint",
            )


def _read_checkpoint(runs: TrialRuns) -> tuple[str, CheckpointContent, dict[str, Any]]:
    path = runs.options.checkpoint or ""
    if "://" not in path and (runs.options.directory / path).exists():
        path = str(runs.options.directory / path)
    try:
        content = load_checkpoint(path)
        with open_checkpoint(path) as directory:
            metadata = directory / METADATA_FILE
            return path, content, json.loads(metadata.read_text()) if metadata.is_file() else {}
    except errors.CheckpointError as e:
        raise CheckFailed(f"--trial-checkpoint {path} cannot be read: {e}") from None
