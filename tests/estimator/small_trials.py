"""Small trials of Estimators, custom and premade, and the same trained by TensorFlow alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import tensorflow as tf

from det_lightning import estimator
from det_lightning.pytorch import Batch

SEED = 7
SAMPLES, BATCH_SIZE = 64, 8
EPOCH = SAMPLES // BATCH_SIZE

Wrap = Callable[[Any], Any]


def samples(seed: int, count: int) -> Any:
    inputs = np.random.RandomState(seed).rand(count, 4).astype("float32")
    return tf.data.Dataset.from_tensor_slices(({"x": inputs}, (inputs.sum(1) > 2).astype("int32")))


def training_data(wrap: Wrap = lambda dataset: dataset) -> Any:
    return wrap(samples(0, SAMPLES)).shuffle(SAMPLES).batch(BATCH_SIZE)


def repeated_training_data(wrap: Wrap = lambda dataset: dataset) -> Any:
    return wrap(samples(0, SAMPLES)).shuffle(SAMPLES).repeat().batch(BATCH_SIZE)


def validation_data(wrap: Wrap = lambda dataset: dataset) -> Any:
    return wrap(samples(1, 30)).batch(BATCH_SIZE)


def run_config() -> Any:
    return tf.estimator.RunConfig(tf_random_seed=SEED)


def custom(wrap: Wrap) -> Any:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        hidden = tf.compat.v1.layers.dense(features["x"], 8, activation=tf.nn.relu)
        hidden = tf.compat.v1.layers.dropout(hidden, 0.3, training=mode == tf.estimator.ModeKeys.TRAIN)
        logits = tf.compat.v1.layers.dense(hidden, 2)
        loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits)
        accuracy = tf.compat.v1.metrics.accuracy(labels, tf.argmax(logits, 1))
        if mode == tf.estimator.ModeKeys.EVAL:
            return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": accuracy})
        optimizer = wrap(tf.compat.v1.train.AdamOptimizer(0.01))
        train_op = optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return tf.estimator.Estimator(model_fn, config=run_config())


def columns() -> list[Any]:
    return [tf.feature_column.numeric_column("x", shape=(4,))]


def premade(wrap: Wrap) -> Any:
    optimizer = wrap(tf.keras.optimizers.legacy.Adagrad(0.1))
    return tf.estimator.DNNClassifier([8], columns(), optimizer=optimizer, dropout=0.2, config=run_config())


def premade_of_version_1(wrap: Wrap) -> Any:
    optimizer = wrap(tf.compat.v1.train.AdamOptimizer(0.05))
    return tf.compat.v1.estimator.DNNClassifier([8], columns(), optimizer=optimizer, config=run_config())


def two_optimizers(wrap: Wrap) -> Any:
    return tf.estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=columns(),
        linear_optimizer=wrap(tf.keras.optimizers.legacy.Ftrl(0.1)),
        dnn_feature_columns=columns(),
        dnn_optimizer=wrap(tf.keras.optimizers.legacy.Adagrad(0.1)),
        dnn_hidden_units=[8],
        config=run_config(),
    )


def warm_started(wrap: Wrap) -> Any:
    first = tf.estimator.LinearClassifier(columns(), model_dir=tempfile.mkdtemp(), config=run_config())
    first.train(validation_data, steps=2)
    options = {"optimizer": wrap(tf.keras.optimizers.legacy.Adagrad(0.1)), "config": run_config()}
    return tf.estimator.LinearClassifier(columns(), warm_start_from=first.model_dir, **options)


def of_keras(wrap: Wrap) -> Any:
    """Return the estimator of a model of Keras, whose weights are those of the model when it was compiled."""
    tf.compat.v1.set_random_seed(SEED)
    inputs = tf.keras.Input((4,), name="x")
    outputs = tf.keras.layers.Dense(2, activation="softmax")(tf.keras.layers.Dropout(0.2)(inputs))
    model = tf.keras.Model(inputs, outputs)
    optimizer = wrap(tf.keras.optimizers.legacy.Adam(0.05))
    model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])
    return tf.keras.estimator.model_to_estimator(model, model_dir=tempfile.mkdtemp(), config=run_config())


def batch_normalized(wrap: Wrap) -> Any:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        training = mode == tf.estimator.ModeKeys.TRAIN
        normalized = tf.compat.v1.layers.batch_normalization(features["x"], training=training)
        loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, tf.compat.v1.layers.dense(normalized, 2))
        optimizer = wrap(tf.compat.v1.train.AdamOptimizer(0.01))
        with tf.control_dependencies(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)):
            train_op = optimizer.minimize(loss, global_step=tf.compat.v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return tf.estimator.Estimator(model_fn, config=run_config())


class SmallTrial(estimator.EstimatorTrial):
    """Trains what ``make`` returns; tests vary it by subclassing."""

    make: Callable[[Wrap], Any] = staticmethod(custom)
    training_data: Callable[[Wrap], Any] = staticmethod(training_data)
    hooks: tuple[Any, ...] = ()

    def build_estimator(self) -> Any:
        return self.make(self.context.wrap_optimizer)

    def build_train_spec(self) -> Any:
        return tf.estimator.TrainSpec(lambda: self.training_data(self.context.wrap_dataset), hooks=[*self.hooks])

    def build_validation_spec(self) -> Any:
        return tf.estimator.EvalSpec(lambda: validation_data(self.context.wrap_dataset), steps=None)


def small_trial(**attributes: Any) -> type[SmallTrial]:
    given = {name: staticmethod(value) if callable(value) else value for name, value in attributes.items()}
    return type("SmallTrial", (SmallTrial,), given)


class Reports(pl.Callback):
    """What a run reports: the loss of each batch, and the metrics of each validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[dict[str, Any]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, estimator.EstimatorModule | pl.LightningModule)
        getattr(pl_module, "reporters").append(self)  # noqa: B009 (of a TrialModule)

    def report_training(self, steps_completed: int, avg_metrics: Any, batch_metrics: list[dict[str, Any]]) -> None:
        self.losses += [float(metrics["loss"]) for metrics in batch_metrics]

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.validations.append(dict(metrics))


class Trained:
    """A run of a trial that has ended: its reports, and its last checkpoint."""

    def __init__(self, trial_class: type[Any], folder: Path, batches: int, init: Any = None, **options: Any) -> None:
        self.reports = Reports()
        with estimator.init(**{"hparams": {}, "enable_tensorboard_logging": False, **(init or {})}) as context:
            self.context = context
            trainer = estimator.Trainer(trial_class(context), context, callbacks=[self.reports])
            trainer.fit(
                max_length=Batch(batches),
                **{"checkpoint_storage": folder / "checkpoints", "checkpoint_policy": "none", **options},
            )
            self.checkpoint = Path(trainer.checkpoints.last_checkpoint_path or "")


class _Losses(tf.estimator.SessionRunHook):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def begin(self) -> None:
        self.tensor = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)[-1]

    def before_run(self, run_context: Any) -> Any:
        return tf.estimator.SessionRunArgs(self.tensor)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.losses.append(float(run_values.results))


def train_with_tensorflow_alone(
    make: Callable[[Wrap], Any], input_fn: Callable[[], Any], batches: int
) -> tuple[list[float], dict[str, Any]]:
    """Return the loss of each batch, and the metrics at the end, of ``tf.estimator.train_and_evaluate``."""
    losses = _Losses()
    metrics, _ = tf.estimator.train_and_evaluate(
        make(lambda optimizer: optimizer),
        tf.estimator.TrainSpec(input_fn, max_steps=batches, hooks=[losses]),
        tf.estimator.EvalSpec(validation_data, steps=None),
    )
    return losses.losses, metrics
