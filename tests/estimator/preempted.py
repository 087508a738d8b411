"""What test_preemption.py runs in a process of its own: a training that is asked to end on the way.

python -m tests.estimator.preempted FOLDER WHERE [LATEST]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from det_lightning.pytorch import Batch
from tests.estimator.small_trials import Trained, small_trial, validation_data

BATCHES, AT = 11, 6


class AskToEnd(tf.estimator.SessionRunHook):
    """Sends SIGTERM to its own process after a number of runs of the session, counting from the first one."""

    def __init__(self, at: int) -> None:
        self.left = at

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)


def main(folder: str, where: str, latest: str | None = None) -> None:
    hooks = {"training": [], "evaluation": [], where: [AskToEnd(AT)]}

    class Asked(small_trial(hooks=tuple(hooks["training"]))):  # type: ignore[misc]
        def build_validation_spec(self) -> Any:
            return tf.estimator.EvalSpec(
                lambda: validation_data(self.context.wrap_dataset), steps=None, hooks=hooks["evaluation"]
            )

    trained = Trained(Asked, Path(folder), BATCHES, validation_period=Batch(4), latest_checkpoint=latest)
    found = {"losses": trained.reports.losses, "validations": trained.reports.validations}
    Path(folder, "end.json").write_text(json.dumps(found, default=float))


if __name__ == "__main__":
    main(*sys.argv[1:])
