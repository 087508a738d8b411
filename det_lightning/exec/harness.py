"""``python -m det_lightning.exec.harness module:Class``: train a trial class as an experiment's configuration says."""

from __future__ import annotations

import logging
import sys
from typing import Any

import det_lightning
from det_lightning import compat
from det_lightning.core._task import TrialTask, current_task
from det_lightning.importing import load_class
from det_lightning.pytorch._trainer import Trainer, init
from det_lightning.units import Batch, Epoch, TrainUnit


def main(entrypoint: str) -> int:
    """Train the class that ``entrypoint`` names, in a process of a trial of an experiment.

    Raises:
        RuntimeError: the process belongs to no experiment.
    """
    task = current_task()
    if task is None:
        raise RuntimeError("The harness trains trials of experiments; start one with `det-lightning run CONFIG`.")
    level = logging.DEBUG if task.config.get("debug") else logging.INFO
    logging.basicConfig(level=level, format=det_lightning.LOG_FORMAT)
    compat.install()
    trial_class = load_class(entrypoint)
    optimizations = task.config.get("optimizations") or {}
    with init(
        hparams=task.hparams,
        exp_conf=task.config,
        aggregation_frequency=optimizations.get("aggregation_frequency", 1),
        trial_seed=task.trial_seed,
    ) as context:
        trial = trial_class(context)
        Trainer(trial, context, enable_progress_bar=False).fit(**fit_arguments(task))
    return 0


def fit_arguments(task: TrialTask) -> dict[str, Any]:
    """Return the arguments of ``Trainer.fit`` that mean what the configuration of the task says.

    Raises:
        ValueError: the configuration does not say how long to train.
    """
    config = task.config
    validations = (_period(config.get("min_validation_period"), task.hparams), _rungs(task))
    return {
        "max_length": _max_length(config["searcher"], task.hparams),
        "validation_period": [unit for unit in validations if unit is not None] or None,
        "checkpoint_period": _period(config.get("min_checkpoint_period"), task.hparams),
        "reporting_period": Batch(config.get("scheduling_unit") or 100),
        "checkpoint_policy": config.get("checkpoint_policy") or "best",
        "step_zero_validation": bool(config.get("perform_initial_validation")),
        "latest_checkpoint": task.latest_checkpoint,
    }


def _max_length(searcher: dict[str, Any], hparams: dict[str, Any]) -> TrainUnit:
    length = searcher.get("max_length")
    if length is None and searcher.get("max_time") is not None:
        length = {searcher.get("time_metric"): searcher["max_time"]}
    if length is None:
        raise ValueError(
            "The configuration does not say how long to train. Give searcher.max_length, such as {batches: 1000}."
        )
    return _unit(length, hparams)


def _period(period: Any, hparams: dict[str, Any]) -> TrainUnit | None:
    if period is None or _count(period) < 1:
        return None
    return _unit(period, hparams)


def _rungs(task: TrialTask) -> TrainUnit | None:
    if not task.validate_at:
        return None
    searcher = task.config["searcher"]
    length = searcher.get("max_length")
    unit = searcher.get("time_metric") or (next(iter(length)) if isinstance(length, dict) else "batches")
    lengths = tuple(task.validate_at)
    return Epoch(lengths) if unit == "epochs" else Batch(lengths)


def _count(length: Any) -> int:
    return int(next(iter(length.values())) if isinstance(length, dict) else length)


def _unit(length: Any, hparams: dict[str, Any]) -> TrainUnit:
    """Return a length of a configuration as ``Batch`` or ``Epoch``; a number without a unit counts batches."""
    if not isinstance(length, dict):
        return Batch(int(length))
    ((unit, count),) = length.items()
    if unit == "epochs":
        return Epoch(count)
    if unit == "records":
        batch_size = hparams.get("global_batch_size")
        if not isinstance(batch_size, int):
            raise ValueError("A length in records needs the hyperparameter global_batch_size.")
        return Batch(max(count // batch_size, 1))
    return Batch(count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
