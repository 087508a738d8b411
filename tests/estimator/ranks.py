"""What test_processes.py runs in one and in two processes; the last argument says what.

torchrun --nproc-per-node 2 -m tests.estimator.ranks FOLDER BATCHES MAKE [LATEST]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.estimator.small_trials import SmallTrial, Trained, columns, run_config, samples

GLOBAL_BATCH = 16


def linear(wrap: Callable[[Any], Any]) -> Any:
    return tf.compat.v1.estimator.LinearClassifier(
        columns(),
        optimizer=wrap(tf.compat.v1.train.AdamOptimizer(0.05)),
        config=run_config(),
        loss_reduction=tf.compat.v1.losses.Reduction.SUM_OVER_BATCH_SIZE,
    )


def deep(wrap: Callable[[Any], Any]) -> Any:
    optimizer = wrap(tf.keras.optimizers.legacy.SGD(0.3, momentum=0.5))
    return tf.estimator.DNNClassifier([8], columns(), optimizer=optimizer, config=run_config())


def with_metric(wrap: Callable[[Any], Any], context: Any) -> Any:
    """Return an estimator whose metric is the largest first input of all validation samples."""

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        spec = linear(wrap).model_fn(features, labels, mode, run_config())
        if mode != tf.estimator.ModeKeys.EVAL:
            return spec
        largest = context.make_metric(
            features["x"][:, 0], lambda values: max(float(np.max(one)) for one in values), np.float32
        )
        return spec._replace(eval_metric_ops={**spec.eval_metric_ops, "largest": largest})

    return tf.estimator.Estimator(model_fn, config=run_config())


class Shared(SmallTrial):
    """A deterministic trial whose ranks together train on the batches of one process."""

    def build_estimator(self) -> Any:
        name = sys.argv[3]
        if name == "with_metric":
            return with_metric(self.context.wrap_optimizer, self.context)
        return {"linear": linear, "deep": deep}[name](self.context.wrap_optimizer)

    def _data(self, seed: int) -> Any:
        dataset = self.context.wrap_dataset(samples(seed, 64))
        return dataset.batch(self.context.get_per_slot_batch_size())

    def build_train_spec(self) -> Any:
        return tf.estimator.TrainSpec(lambda: self._data(0))

    def build_validation_spec(self) -> Any:
        return tf.estimator.EvalSpec(lambda: self._data(1), steps=None)


def main(folder: str, batches: str, make: str, latest: str | None = None) -> None:
    init = {"hparams": {"global_batch_size": GLOBAL_BATCH}, "aggregation_frequency": 2 if make == "linear" else 1}
    trained = Trained(Shared, Path(folder), int(batches), init=init, latest_checkpoint=latest)
    found = {"losses": trained.reports.losses, "validation": trained.reports.validations[-1]}
    if trained.context.distributed.rank == 0:
        text = json.dumps(found, default=float)
        Path(folder, f"{trained.context.distributed.size}-{batches}.json").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
