"""A training of an Estimator that is asked to end saves, ends with the status of all trials, and resumes exactly.

The training runs in a process of its own: python -m tests.estimator.test_preemption FOLDER WHERE [LATEST]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")

import tensorflow as tf

from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.pytorch import Batch
from tests.estimator.small_trials import Trained, small_trial, validation_data
from tests.launching import environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")]


class AskToEnd(tf.estimator.SessionRunHook):
    """Sends SIGTERM to its own process at the sixth run of the session."""

    left = 6

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)


def main(folder: str, where: str, latest: str | None = None) -> None:
    hooks = {"training": [], "evaluation": [], where: [AskToEnd()]}

    class Asked(small_trial(hooks=tuple(hooks["training"]))):  # type: ignore[misc]
        def build_validation_spec(self) -> Any:
            return tf.estimator.EvalSpec(
                lambda: validation_data(self.context.wrap_dataset), steps=None, hooks=hooks["evaluation"]
            )

    reports = Trained(Asked, Path(folder), 11, validation_period=Batch(4), latest_checkpoint=latest).reports
    found = {"losses": reports.losses, "validations": reports.validations}
    Path(folder, "end.json").write_text(json.dumps(found, default=float))


def train(folder: Path, where: str = "nowhere", *latest: str) -> tuple[int, Any]:
    """Return the exit status, and what the training reported, if it came to its end."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.estimator.test_preemption", str(folder), where, *latest]
    status = subprocess.run(command, env=environment(TF_CPP_MIN_LOG_LEVEL="3"), timeout=300).returncode
    return status, None if status else json.loads((folder / "end.json").read_text())


# The sixth run of an evaluation is in the second one, after eight batches.
@pytest.mark.parametrize(("where", "steps"), [("training", 6), ("evaluation", 8)])
def test_sigterm_saves_and_resumes_exactly(where: str, steps: int, tmp_path: Path) -> None:
    status, whole = train(tmp_path / "whole")
    assert status == 0
    assert train(tmp_path / "parts", where) == (errors.PREEMPTED_EXIT_CODE, None) == (75, None)
    storage = CheckpointStorage(tmp_path / "parts" / "checkpoints")
    assert [storage.info(name).metadata["steps_completed"] for name in storage.list_ids()] == [steps]
    status, resumed = train(tmp_path / "parts", "nowhere", "last")
    assert status == 0
    assert resumed["losses"] == whole["losses"][steps:]
    assert resumed["validations"][-1] == whole["validations"][-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
