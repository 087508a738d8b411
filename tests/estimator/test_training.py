"""Trials of Estimators train as TensorFlow alone trains their Estimators, and resume exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")

import pytorch_lightning as pl
import tensorflow as tf

from det_lightning import estimator
from det_lightning.adapters.module import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.pytorch import Batch
from tests.estimator import small_trials as trials
from tests.estimator.small_trials import EPOCH, SEED, Reports, SmallTrial, Trained, small_trial

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("make", [trials.custom, trials.premade, trials.premade_of_version_1])
@pytest.mark.parametrize(
    ("data", "batches"), [(trials.training_data, EPOCH), (trials.repeated_training_data, 2 * EPOCH + 3)]
)
def test_losses_equal_train_and_evaluate(make: Any, data: Any, batches: int, tmp_path: Path) -> None:
    losses, metrics = trials.train_with_tensorflow_alone(make, data, batches)
    ours = Trained(small_trial(make=make, training_data=data), tmp_path, batches)
    assert ours.reports.losses == losses
    assert {name: ours.reports.validations[-1][name] for name in metrics} == metrics


@pytest.mark.parametrize(
    ("make", "split"), [(trials.custom, 3), (trials.premade, EPOCH), (trials.premade_of_version_1, EPOCH + 5)]
)
def test_resumed_runs_equal_whole_ones(make: Callable[..., Any], split: int, tmp_path: Path) -> None:
    trial = small_trial(make=make)
    whole = Trained(trial, tmp_path / "whole", 2 * EPOCH + 3)
    first = Trained(trial, tmp_path / "parts", split)
    second = Trained(trial, tmp_path / "parts", 2 * EPOCH + 3, latest_checkpoint=first.checkpoint)
    assert first.reports.losses + second.reports.losses == whole.reports.losses
    assert second.reports.validations[-1] == whole.reports.validations[-1]


@pytest.mark.parametrize("make", [trials.two_optimizers, trials.warm_started, trials.of_keras])
def test_resumed_losses_equal_train_and_evaluate(make: Callable[..., Any], tmp_path: Path) -> None:
    losses, metrics = trials.train_with_tensorflow_alone(make, trials.repeated_training_data, EPOCH + 3)
    trial = small_trial(make=make, training_data=trials.repeated_training_data)
    first = Trained(trial, tmp_path, 3)
    second = Trained(trial, tmp_path, EPOCH + 3, latest_checkpoint="last")
    assert first.reports.losses + second.reports.losses == losses
    assert {name: second.reports.validations[-1][name] for name in metrics} == metrics


def test_unsavable_data_are_replayed(tmp_path: Path) -> None:
    def generated(wrap: Callable[..., Any]) -> Any:
        def numbers() -> Any:
            for number in range(20):
                yield {"x": [float(number)] * 4}, number % 2

        types = ({"x": tf.float32}, tf.int32)
        return wrap(tf.data.Dataset.from_generator(numbers, types, ({"x": (4,)}, ()))).batch(3)

    trial = small_trial(make=trials.premade, training_data=generated)
    whole = Trained(trial, tmp_path / "whole", 17)
    first = Trained(trial, tmp_path / "parts", 9)
    second = Trained(trial, tmp_path / "parts", 17, latest_checkpoint="last")
    assert first.reports.losses + second.reports.losses == whole.reports.losses


def test_the_trials_seed_counts(tmp_path: Path) -> None:
    as_configured = Trained(SmallTrial, tmp_path / "a", 3).reports.losses
    assert Trained(SmallTrial, tmp_path / "b", 3, init={"trial_seed": SEED}).reports.losses == as_configured
    assert Trained(SmallTrial, tmp_path / "c", 3, init={"trial_seed": SEED + 1}).reports.losses != as_configured


def test_a_run_config_is_optional(tmp_path: Path) -> None:
    trial = small_trial(make=lambda wrap: tf.estimator.Estimator(trials.custom(wrap).model_fn))
    assert len(Trained(trial, tmp_path, 2, init={"trial_seed": SEED}).reports.losses) == 2


def test_validations_change_nothing(tmp_path: Path) -> None:
    without = Trained(SmallTrial, tmp_path / "a", 10)
    among = Trained(SmallTrial, tmp_path / "b", 10, validation_period=Batch(3), step_zero_validation=True)
    assert among.reports.losses == without.reports.losses
    assert [metrics["global_step"] for metrics in among.reports.validations] == [0, 3, 6, 9, 10]


def test_aggregation_equals_a_larger_batch(tmp_path: Path) -> None:
    def linear(wrap: Callable[..., Any]) -> Any:
        # The loss of a batch is the mean over its samples, so that means of gradients are gradients of means.
        return tf.compat.v1.estimator.LinearClassifier(
            trials.columns(),
            optimizer=wrap(tf.compat.v1.train.GradientDescentOptimizer(0.5)),
            config=trials.run_config(),
            loss_reduction=tf.compat.v1.losses.Reduction.SUM_OVER_BATCH_SIZE,
        )

    small = small_trial(make=linear, training_data=lambda wrap: wrap(trials.samples(0, 64)).batch(8))
    large = small_trial(make=linear, training_data=lambda wrap: wrap(trials.samples(0, 64)).batch(16))
    aggregated = Trained(small, tmp_path / "a", 8, init={"aggregation_frequency": 2}).reports.validations[-1]
    at_once = Trained(large, tmp_path / "b", 4).reports.validations[-1]
    for name in ("loss", "average_loss", "accuracy"):
        assert aggregated[name] == pytest.approx(at_once[name], rel=1e-6)
    assert aggregated["global_step"] == 8


def test_resume_within_an_aggregation_is_exact(tmp_path: Path) -> None:
    init = {"aggregation_frequency": 3}
    whole = Trained(SmallTrial, tmp_path / "whole", 10, init=init)
    first = Trained(SmallTrial, tmp_path / "parts", 4, init=init)
    second = Trained(SmallTrial, tmp_path / "parts", 10, init=init, latest_checkpoint="last")
    assert first.reports.losses + second.reports.losses == whole.reports.losses


def test_batch_norms_train_under_aggregation(tmp_path: Path) -> None:
    trial = small_trial(make=trials.batch_normalized)
    whole = Trained(trial, tmp_path / "whole", 6, init={"aggregation_frequency": 2})
    assert whole.reports.validations[-1]["global_step"] == 6
    at_each_batch = Trained(trial, tmp_path / "each", 6)
    # The weights are updated after the second batch for the first time; the statistics are not used in training.
    assert whole.reports.losses[:1] == at_each_batch.reports.losses[:1]
    assert whole.reports.losses[1:] != at_each_batch.reports.losses[1:]


class StopAfter(tf.estimator.SessionRunHook):
    def __init__(self, batches: int) -> None:
        self.left = batches

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.left -= 1
        if not self.left:
            run_context.request_stop()


def test_hooks_stop_at_a_boundary(tmp_path: Path) -> None:
    trial = small_trial(hooks=(StopAfter(4),))
    assert len(Trained(trial, tmp_path, 20, reporting_period=Batch(3)).reports.losses) == 6


def test_test_mode_trains_one_batch(tmp_path: Path) -> None:
    class CountEvaluations(tf.estimator.SessionRunHook):
        runs = 0

        def after_run(self, run_context: Any, run_values: Any) -> None:
            CountEvaluations.runs += 1

    class Counting(SmallTrial):
        def build_validation_spec(self) -> Any:
            spec = super().build_validation_spec()
            return tf.estimator.EvalSpec(spec.input_fn, steps=None, hooks=[CountEvaluations()])

    trained = Trained(Counting, tmp_path, 20, test_mode=True)
    assert len(trained.reports.losses) == 1
    assert CountEvaluations.runs == 1


def fit_module(batches: int, ckpt_path: Any = None, *callbacks: pl.Callback) -> tuple[Reports, pl.Trainer]:
    reports = Reports()
    flags: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": 1000}
    for feature in ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"):
        flags[feature] = False
    trainer = pl.Trainer(accelerator="cpu", callbacks=[reports, *callbacks], **flags)
    trainer.fit(estimator.EstimatorModule(SmallTrial, {}, max_length=Batch(batches)), ckpt_path=ckpt_path)
    return reports, trainer


def test_modules_resume_from_both_formats(tmp_path: Path) -> None:
    whole, _ = fit_module(9)
    assert whole.losses == Trained(SmallTrial, tmp_path / "ours", 9).reports.losses
    checkpoints = DeterminedCheckpoint(tmp_path / "checkpoints", policy="none")
    first, trainer = fit_module(4, None, checkpoints)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    for path in (checkpoints.last_checkpoint_path, tmp_path / "last.ckpt"):
        second, _ = fit_module(9, path)
        assert first.losses + second.losses == whole.losses


def test_validate_equals_the_validation_in_training(tmp_path: Path) -> None:
    trained = Trained(SmallTrial, tmp_path, 5)
    module = estimator.EstimatorModule(SmallTrial, {})
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    (metrics,) = trainer.validate(module, ckpt_path=str(trained.checkpoint), verbose=False)
    assert metrics["loss"] == trained.reports.validations[-1]["loss"]
    assert isinstance(module, TrialModule)


@pytest.mark.parametrize("batches", [0, 1])
def test_empty_validation_data_are_warned_of(batches: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Trial(SmallTrial):
        def build_validation_spec(self) -> Any:
            return tf.estimator.EvalSpec(
                lambda: trials.validation_data(self.context.wrap_dataset).take(batches), steps=None
            )

    Trained(Trial, tmp_path, 1)
    assert ("validated no batch" in caplog.text) is (batches == 0)
