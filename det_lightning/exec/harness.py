"""``python -m det_lightning.exec.harness module:Class``: train a trial class with an experiment's configuration."""

from __future__ import annotations

import logging
import sys
from typing import Any

import det_lightning
from det_lightning import compat
from det_lightning.core._task import current_task
from det_lightning.importing import load_class
from det_lightning.pytorch import _trainer
from det_lightning.pytorch._pytorch_trial import build_trial, require_trial_class


def main(entrypoint: str) -> int:
    """Train the class named by ``entrypoint``, in a process of a trial of an experiment.

    Raises:
        RuntimeError: the process belongs to no experiment.
    """
    task = current_task()
    if task is None:
        raise RuntimeError(
            "The harness trains trials of experiments; start an experiment with `det-lightning run CONFIG`."
        )
    level = logging.DEBUG if task.config.get("debug") else logging.INFO
    logging.basicConfig(level=level, format=det_lightning.LOG_FORMAT)
    compat.install()
    trial_class = load_class(entrypoint)
    api = _choose_api(trial_class)
    with api.init() as context:
        trainer = api.Trainer(build_trial(trial_class, context), context, enable_progress_bar=False)
        trainer.fit(latest_checkpoint=task.latest_checkpoint)
    return 0


def _choose_api(trial_class: type) -> Any:
    """Return the module with ``init`` and ``Trainer`` for a kind of trials."""
    # TensorFlow is slow to import; the class shows whether TensorFlow is needed.
    estimator = sys.modules.get("det_lightning.estimator")
    if estimator is not None and isinstance(trial_class, type) and issubclass(trial_class, estimator.EstimatorTrial):
        return estimator
    require_trial_class("The entrypoint", trial_class)
    return _trainer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
