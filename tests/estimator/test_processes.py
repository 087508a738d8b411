"""Two processes that share each batch train like one, but for rounding.

They run python -m tests.estimator.test_processes FOLDER BATCHES MAKE [LATEST]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")

import numpy as np
import tensorflow as tf

from tests.estimator.small_trials import SmallTrial, Trained, columns, run_config, samples
from tests.launching import LAUNCHER, environment

pytestmark = pytest.mark.slow


class Deep(SmallTrial):
    """A deterministic trial whose ranks together train on the batches of one process."""

    frequency = 1

    def build_estimator(self) -> Any:
        optimizer = self.context.wrap_optimizer(tf.keras.optimizers.legacy.SGD(0.3, momentum=0.5))
        return tf.estimator.DNNClassifier([8], columns(), optimizer=optimizer, config=run_config())

    def _data(self, seed: int) -> Any:
        dataset = self.context.wrap_dataset(samples(seed, 64))
        return dataset.batch(self.context.get_per_slot_batch_size())

    def build_train_spec(self) -> Any:
        return tf.estimator.TrainSpec(lambda: self._data(0))

    def build_validation_spec(self) -> Any:
        return tf.estimator.EvalSpec(lambda: self._data(1), steps=None)


class Linear(Deep):
    """Aggregates; a metric of its own is the largest first input of all validation samples."""

    frequency = 2

    def build_estimator(self) -> Any:
        def largest_of(values: list[Any]) -> float:
            return max(float(np.max(one)) for one in values)

        def model_fn(features: Any, labels: Any, mode: str) -> Any:
            optimizer = self.context.wrap_optimizer(tf.compat.v1.train.AdamOptimizer(0.05))
            reduction = tf.compat.v1.losses.Reduction.SUM_OVER_BATCH_SIZE
            linear = tf.compat.v1.estimator.LinearClassifier(
                columns(), optimizer=optimizer, config=run_config(), loss_reduction=reduction
            )
            spec = linear.model_fn(features, labels, mode, run_config())
            if mode != tf.estimator.ModeKeys.EVAL:
                return spec
            largest = self.context.make_metric(features["x"][:, 0], largest_of, np.float32)
            return spec._replace(eval_metric_ops={**spec.eval_metric_ops, "largest": largest})

        return tf.estimator.Estimator(model_fn, config=run_config())


def main(folder: str, batches: str, make: str, latest: str | None = None) -> None:
    trial = {"linear": Linear, "deep": Deep}[make]
    init = {"hparams": {"global_batch_size": 16}, "aggregation_frequency": trial.frequency}
    trained = Trained(trial, Path(folder), int(batches), init=init, latest_checkpoint=latest)
    found = {"losses": trained.reports.losses, "validation": trained.reports.validations[-1]}
    if trained.context.distributed.rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found, default=float))


def train(folder: Path, ranks: int, batches: int, make: str, *latest: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    launcher = [*LAUNCHER, "--", sys.executable] if ranks == 2 else []
    command = [sys.executable, *launcher, "-m", "tests.estimator.test_processes", str(folder), str(batches), make]
    environ = environment(TF_CPP_MIN_LOG_LEVEL="3")
    done = subprocess.run([*command, *latest], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize("make", ["linear", "deep"])
def test_two_processes_train_as_one(make: str, tmp_path: Path) -> None:
    one = train(tmp_path / "one", 1, 6, make)
    two = train(tmp_path / "two", 2, 6, make)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    for name in ("loss", "average_loss", "accuracy", "global_step", *(["largest"] if make == "linear" else [])):
        assert two["validation"][name] == pytest.approx(one["validation"][name], rel=1e-5)


def test_two_processes_resume_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, 6, "linear")
    first = train(tmp_path / "parts", 2, 3, "linear")
    second = train(tmp_path / "parts", 2, 6, "linear", "last")
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["validation"] == whole["validation"]


if __name__ == "__main__":
    main(*sys.argv[1:])
