"""Records of a training: reading one that was made elsewhere, and making one here, on either side.

A record is the JSON file that :mod:`det_lightning.testing.recorder` writes. The same recorder watches the real
determined (in a process of its own, or long ago in an old environment) and det_lightning (in this process), so that
both records have the same form. Compare them with :func:`det_lightning.testing.comparison.first_difference`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["RecordError", "RunSettings", "TrainingRecord", "read_record", "record_determined", "record_ours"]


class RecordError(Exception):
    """A record can not be read or made; the message says which, why and what to do."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What a run depends on besides the trial: two records can be compared only where these are equal.

    Attributes:
        hparams: the hyperparameters, without ranges.
        config: the experiment configuration, or None.
        batches: number of batches to train.
        seed: what Python's, numpy's and torch's random generators are seeded with before the trial is built.
        validation_period: number of batches between validations; one at the end is always made.
        reporting_period: number of batches of a training workload.
        aggregation_frequency: number of batches whose gradients make one optimizer update.
    """

    hparams: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    batches: int = 20
    seed: int = 0
    validation_period: int = 10
    reporting_period: int = 5
    aggregation_frequency: int = 1


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """What was seen of one training.

    Attributes:
        trial: the trial's class, as ``"module:Class"``.
        settings: what the run was started with.
        environment: versions and machine: ``side`` (``"determined"`` or ``"det_lightning"``), ``determined`` or
            ``det_lightning`` (version), ``python``, ``torch``, ``numpy``, ``platform``, ``processor``, ``threads``,
            ``device``.
        events: what happened, in order of time; each has ``event`` and ``batch`` (number of batches trained before).
        batches: number of batches that were trained.
        error: None, or ``type``, ``message`` and ``traceback`` of what ended the training.
        path: the file that it was read from, if any.
    """

    trial: str
    settings: RunSettings
    environment: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]
    batches: int
    error: Mapping[str, str] | None = None
    path: Path | None = None

    def training_metrics(self) -> dict[str, list[tuple[int, float]]]:
        """Return the curve of each scalar training metric: pairs of batch index and value."""
        raise NotImplementedError

    def validation_metrics(self) -> dict[str, list[tuple[int, float]]]:
        """Return the curve of each scalar validation metric: pairs of number of batches trained and value."""
        raise NotImplementedError


def read_record(path: str | os.PathLike[str], trial: str | None = None) -> TrainingRecord:
    """Read a record.

    Args:
        path: the file that the recorder wrote.
        trial: the trial that it should be of, as ``"module:Class"``; only the class's name is compared, since modules
            move.

    Raises:
        RecordError: there is no such file, it is no record, it is damaged, made by a newer recorder, or of another
            trial.
    """
    raise NotImplementedError


def record_ours(trial: type, settings: RunSettings, *, spec: str | None = None) -> TrainingRecord:
    """Train ``trial`` on det_lightning in this process, and return what was seen.

    An error of the trial ends up in the record. The random generators and torch's number of threads are put back.

    Args:
        trial: a ``PyTorchTrial`` class.
        settings: what to run, such as ``read_record(path).settings``.
        spec: the name to record, by default ``"module:Class"`` of the class.
    """
    raise NotImplementedError


def record_determined(
    spec: str,
    settings: RunSettings,
    *,
    directory: str | os.PathLike[str] = ".",
    python: str | os.PathLike[str] | None = None,
    timeout_s: float = 600,
) -> TrainingRecord:
    """Train a trial on the real determined, in a process of its own, and return what was seen.

    A trial that imports ``det_lightning`` gets determined under that name there.

    Args:
        spec: the trial as ``"module:Class"``.
        settings: what to run.
        directory: where the module is imported from, and the working directory.
        python: the interpreter to run, by default the present one.
        timeout_s: give up after so many seconds.

    Raises:
        RecordError: determined is not installed there, the trial can not be imported, or the process failed or took
            too long. (An error while it trains is not raised; it is in the record.)
    """
    raise NotImplementedError
