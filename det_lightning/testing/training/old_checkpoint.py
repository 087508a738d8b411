"""A checkpoint of earlier times, loaded into the trial and validated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from det_lightning import errors
from det_lightning.checkpoint import load_checkpoint, open_checkpoint
from det_lightning.checkpoint.layout import METADATA_FILE
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.outcomes import CheckFailed
from det_lightning.testing.training.execution import Run, train, validate
from det_lightning.testing.training.plans import RunPlan
from det_lightning.testing.training.trial_source import TrialSource

# Where releases of Determined wrote validation metrics, and what may lie around them there.
_PATHS = ("validation_metrics", "training.validation_metrics", "training.validationMetrics", "validation.metrics",
          "metrics")  # fmt: skip
_WRAPPERS = ("validation_metrics", "validationMetrics", "avgMetrics", "metrics")


@dataclasses.dataclass(frozen=True)
class OldCheckpoint:
    """A checkpoint, and what becomes of it.

    Attributes:
        path: path or URL.
        recorded: validation metrics that were written down with it; empty if there are none.
        resumed: a run that goes on from it for one batch.
        validated: one that validates with its weights, on all of the validation data.
    """

    path: str
    recorded: dict[str, float]
    resumed: Run
    validated: Run

    @property
    def measured(self) -> dict[str, float]:
        """The validation metrics that were found, those that are numbers."""
        validations = self.validated.observer.validations
        return _numbers(validations[-1][1]) if validations else {}

    @classmethod
    def open(cls, options: TrialOptions, source: TrialSource, resuming: RunPlan, validating: RunPlan) -> OldCheckpoint:
        """Load the checkpoint of the options, and validate with it.

        Args:
            options: which checkpoint.
            source: of the trial's class.
            resuming: how to run what goes on from it.
            validating: how to run what validates with it.

        Raises:
            CheckFailed: it cannot be read; says why.
        """
        path = options.checkpoint or ""
        if "://" not in path and (options.directory / path).exists():
            path = str(options.directory / path)
        try:
            steps = load_checkpoint(path).trial_state.batches_trained
            with open_checkpoint(path) as directory:
                metadata = directory / METADATA_FILE
                content = json.loads(metadata.read_text()) if metadata.is_file() else {}
        except errors.CheckpointError as e:
            raise CheckFailed(f"--trial-checkpoint {path} cannot be read: {e}") from None
        resuming = dataclasses.replace(
            resuming,
            settings=dataclasses.replace(resuming.settings, batches=steps + 1),
            validate_after=frozenset(),
            validation_batches=1,
            resume_from=path,
        )
        resumed = train(source, resuming, Observer())
        validated = validate(source, dataclasses.replace(validating, resume_from=path), Observer())
        return cls(path, options.metrics or recorded_metrics(content), resumed, validated)


def recorded_metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the validation metrics in the metadata of a checkpoint.

    det_lightning writes the searcher's metric. The platform's download has all, under names that changed.
    """
    metric = metadata.get("metric")
    if isinstance(metric, Mapping) and "name" in metric:
        return _numbers({metric["name"]: metric.get("value")})
    for path in _PATHS:
        found: Any = metadata
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            while inner := [found[name] for name in _WRAPPERS if isinstance(found.get(name), Mapping)]:
                found = inner[0]
            return _numbers(found)
    return {}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    kinds = (int, float, np.ndarray, np.generic)
    return {n: float(value) for n, value in metrics.items() if isinstance(value, kinds) and np.ndim(value) == 0}
