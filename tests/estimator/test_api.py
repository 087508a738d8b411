"""The API that trials are written against: wrappers, metrics of one's own, caches, hooks, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")

import numpy as np
import pytorch_lightning as pl
import tensorflow as tf

from det_lightning import errors, estimator
from det_lightning.pytorch import Batch
from tests.estimator import small_trials as trials
from tests.estimator.small_trials import BATCH_SIZE, SmallTrial, Trained, custom, small_trial

pytestmark = pytest.mark.slow


def test_public_names_come_with_tensorflow_1_behaviour() -> None:
    assert sorted(estimator.__all__) == [
        *("EstimatorContext", "EstimatorExperimentalContext", "EstimatorModule", "EstimatorNativeContext"),
        *("EstimatorTrial", "EstimatorTrialContext", "MetricReducer", "RunHook", "ServingInputReceiverFn", "Trainer"),
        *("init", "load_estimator_from_checkpoint_path"),
    ]
    assert [name for name in estimator.__all__ if not getattr(estimator, name).__doc__] == ["ServingInputReceiverFn"]
    assert estimator.EstimatorTrial.trial_context_class is estimator.EstimatorTrialContext
    assert not tf.executing_eagerly()
    assert not tf.compat.v1.resource_variables_enabled()


@pytest.mark.parametrize("by_module", [False, True])
def test_fields_of_estimators_are_not_called_idle(
    by_module: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = {"type": "shared_fs", "container_storage_path": str(tmp_path)}
    config = {"records_per_epoch": 64, "data_layer": layer, "max_restarts": 2}
    if by_module:
        trainer = pl.Trainer(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(estimator.EstimatorModule(SmallTrial, {}, exp_conf=config, max_length=Batch(1)))
    else:
        Trained(SmallTrial, tmp_path, 1, init={"exp_conf": config})
    (warning,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert warning.endswith("these fields have no effect here: max_restarts.")


# Metrics of one's own


class MeanReducer(estimator.MetricReducer):
    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def accumulate(self, metric: Any) -> tuple[float, int]:
        self.total += float(np.sum(metric))
        self.count += len(metric)
        return self.total, self.count

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        totals, counts = zip(*per_slot_metrics, strict=True)
        return sum(totals) / sum(counts)


def mean_of_batches(values: list[Any]) -> Any:
    return np.mean(np.hstack(values))


class WithMetrics(SmallTrial):
    """Its metrics are means of the first input, computed in different ways."""

    def build_estimator(self) -> Any:
        context = self.context

        def model_fn(features: Any, labels: Any, mode: str) -> Any:
            if mode == tf.estimator.ModeKeys.TRAIN:
                return custom(context.wrap_optimizer).model_fn(features, labels, mode, None)
            first = features["x"][:, 0]
            logits = tf.compat.v1.layers.dense(tf.compat.v1.layers.dense(features["x"], 8), 2)
            metrics = {
                "by_function": context.make_metric(first, mean_of_batches, np.float32),
                "by_reducer": context.experimental.make_metric(first, MeanReducer(), np.float64),
                "of_list": context.make_metric([first, first], lambda all_: np.mean(all_[0][1]), "float32"),
                "of_dict": context.make_metric(
                    {"a": first, "b": labels}, lambda all_: mean_of_batches([one["a"] for one in all_]), np.float32
                ),
            }
            loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits)
            return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

        return tf.estimator.Estimator(model_fn, config=trials.run_config())


def test_metrics_are_means_over_all_batches(tmp_path: Path) -> None:
    metrics = Trained(WithMetrics, tmp_path, 2).reports.validations[-1]
    inputs = np.random.RandomState(1).rand(30, 4).astype("float32")[:, 0]
    for name in ("by_function", "by_reducer", "of_dict"):
        assert metrics[name] == pytest.approx(inputs.mean(), rel=1e-6)
    assert metrics["of_list"] == pytest.approx(inputs[:BATCH_SIZE].mean(), rel=1e-6)


@pytest.mark.parametrize("metric", [[["nested"]], {"a": {"b": 1}}, {1: 2}, object()])
def test_nested_metrics_are_refused(metric: Any) -> None:
    with estimator.init(hparams={}) as context, pytest.raises(TypeError, match=r"metric"):
        context.make_metric(metric, mean_of_batches, np.float32)


# Hooks


class RecordingHook(estimator.RunHook):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.events.append("after_run")

    def on_checkpoint_load(self, checkpoint_dir: str) -> None:
        self.events.append(("load", (Path(checkpoint_dir) / "metadata.txt").read_text()))

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        self.events.append("checkpoint")
        (Path(checkpoint_dir) / "metadata.txt").write_text("my_metadata")

    def on_trial_close(self) -> None:
        self.events.append("close")


def test_run_hooks_get_their_events(tmp_path: Path) -> None:
    hook = RecordingHook()
    first = Trained(small_trial(hooks=(hook,)), tmp_path, 2)
    assert hook.events == ["after_run", "after_run", "checkpoint", "close"]
    assert (first.checkpoint / "metadata.txt").read_text() == "my_metadata"
    again = RecordingHook()
    Trained(small_trial(hooks=(again,)), tmp_path, 3, latest_checkpoint=first.checkpoint)
    assert again.events == [("load", "my_metadata"), "after_run", "checkpoint", "close"]


# Caches


class Cached(SmallTrial):
    """Its datasets are cached; it counts how often they are made."""

    made = 0
    shuffle = False

    def build_train_spec(self) -> Any:
        def input_fn() -> Any:
            @self.context.experimental.cache_train_dataset("small", "v1", shuffle=self.shuffle)
            def make_dataset() -> Any:
                type(self).made += 1
                return trials.samples(0, 64)

            return make_dataset().batch(self.context.get_per_slot_batch_size())

        return tf.estimator.TrainSpec(input_fn)

    def build_validation_spec(self) -> Any:
        @self.context.experimental.cache_validation_dataset("small", "v1")
        def make_dataset() -> Any:
            return trials.samples(1, 30)

        return tf.estimator.EvalSpec(lambda: make_dataset().batch(self.context.get_per_slot_batch_size()), steps=None)


def cached(folder: Path, shuffle: bool) -> dict[str, Any]:
    Cached.shuffle = shuffle
    layer = {"type": "shared_fs", "container_storage_path": str(folder / "cache")}
    return {"hparams": {"global_batch_size": 8}, "exp_conf": {"data_layer": layer}, "trial_seed": 5}


def test_a_dataset_is_cached_once(tmp_path: Path) -> None:
    Cached.made = 0
    init = cached(tmp_path, shuffle=False)
    first = Trained(Cached, tmp_path / "a", 20, init=init)
    second = Trained(Cached, tmp_path / "b", 20, init=init)
    assert Cached.made == 1
    assert first.reports.losses == second.reports.losses
    assert first.reports.validations == second.reports.validations
    written = [path.name.split("-")[1] for path in (tmp_path / "cache").iterdir()]
    assert sorted(written) == ["v1_train", "v1_val"]


def test_cached_shuffles_resume_exactly(tmp_path: Path) -> None:
    init = cached(tmp_path, shuffle=True)
    whole = Trained(Cached, tmp_path / "whole", 20, init=init)
    first = Trained(Cached, tmp_path / "parts", 11, init=init)
    second = Trained(Cached, tmp_path / "parts", 20, init=init, latest_checkpoint="last")
    assert first.reports.losses + second.reports.losses == whole.reports.losses
    in_order = Trained(Cached, tmp_path / "in-order", 20, init=cached(tmp_path, shuffle=False))
    assert in_order.reports.losses != whole.reports.losses


def test_a_cache_runs_no_code(tmp_path: Path) -> None:
    init = cached(tmp_path, shuffle=False)
    Trained(Cached, tmp_path / "a", 2, init=init)
    for file in (tmp_path / "cache").rglob("element_spec.pkl"):
        file.write_bytes(b"cos\nmkdir\n(S'" + str(tmp_path / "attacked").encode() + b"'\ntR.")
    with pytest.raises(pickle.UnpicklingError, match=r"element_spec\.pkl of a cached dataset refers to os\.mkdir"):
        Trained(Cached, tmp_path / "b", 2, init=init)
    assert not (tmp_path / "attacked").exists()


# What is refused


class CachedAndWrapped(Cached):
    def build_train_spec(self) -> Any:
        spec = super().build_train_spec()
        return tf.estimator.TrainSpec(lambda: self.context.wrap_dataset(spec.input_fn()))


def with_strategy(wrap: Any) -> Any:
    config = tf.estimator.RunConfig(train_distribute=tf.distribute.OneDeviceStrategy("/cpu:0"))
    return tf.estimator.Estimator(custom(wrap).model_fn, config=config)


OTHER_OBJECTS: dict[str, Any] = {
    "build_estimator": lambda self: "an estimator",
    "build_train_spec": lambda self: tf.estimator.EvalSpec(trials.validation_data),
    "build_validation_spec": lambda self: tf.estimator.TrainSpec(trials.training_data),
}


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (small_trial(training_data=lambda wrap: trials.training_data()), r"context\.wrap_dataset\(dataset\)"),
        (small_trial(make=lambda wrap: custom(lambda optimizer: optimizer)), r"context\.wrap_optimizer\(optimizer\)"),
        (
            type("Trial", (SmallTrial,), OTHER_OBJECTS),
            r"build_estimator\(\) must return a tf\.estimator\.Estimator; got a str.*"
            r"build_train_spec\(\) must return a tf\.estimator\.TrainSpec; got a EvalSpec.*"
            r"build_validation_spec\(\) must return a tf\.estimator\.EvalSpec; got a TrainSpec",
        ),
        (small_trial(training_data=lambda wrap: (1, 2)), r"must return a tf\.data\.Dataset; got a tuple"),
        (small_trial(make=with_strategy), r"train_distribute=.*leave it out"),
        (CachedAndWrapped, r"cache_train_dataset\(\) and to context\.wrap_dataset\(\)"),
    ],
)
def test_unusable_trials_are_refused(trial: type[SmallTrial], message: str, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=message) as raised:
        Trained(trial, tmp_path, 2, init=cached(tmp_path, shuffle=False))
    assert isinstance(raised.value, RuntimeError) or "tuple" in str(raised.value)


def test_a_module_wants_a_trial_class() -> None:
    with pytest.raises(TypeError, match=r"subclass of det_lightning\.estimator\.EstimatorTrial"):
        estimator.EstimatorModule(object)  # type: ignore[arg-type]
