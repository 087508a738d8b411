"""``python -m det_lightning.exec.harness module:Class``: train a trial class as an experiment's configuration says."""

from __future__ import annotations

import logging
import sys

import det_lightning
from det_lightning import compat
from det_lightning.core._task import current_task
from det_lightning.importing import load_class
from det_lightning.pytorch._trainer import Trainer, init


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
    with init() as context:
        trainer = Trainer(trial_class(context), context, enable_progress_bar=False)
        trainer.fit(latest_checkpoint=task.latest_checkpoint)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
