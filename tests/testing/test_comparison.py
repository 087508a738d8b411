"""The first difference of two records."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning import pytorch
from det_lightning.testing import recorder
from det_lightning.testing.records.comparison import first_difference
from det_lightning.testing.records.difference import BIT_EQUAL, Difference, Tolerance, choose_tolerance
from det_lightning.testing.records.record import TrainingRecord, parse_record
from det_lightning.testing.training.reference import record_ours
from tests.testing.recorded_trials import SETTINGS, Fails, Regression, recorded


@pytest.fixture
def ours() -> TrainingRecord:
    return copy.deepcopy(recorded())


def recorded_elsewhere() -> TrainingRecord:
    return dataclasses.replace(recorded(), environment={**recorded().environment, "torch": "1.12.1"})


def differ(reference: TrainingRecord, ours: TrainingRecord) -> Difference:
    difference = first_difference(reference, ours)
    assert difference is not None
    return difference


def test_equal_trainings_have_no_difference() -> None:
    assert first_difference(recorded(), record_ours(Regression, SETTINGS), BIT_EQUAL) is None


class DrawsMore(Regression):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 2:
            torch.rand(1)
        return super().train_batch(batch, epoch_idx, batch_idx)


class ScalesTheLoss(Regression):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss * (2 if batch_idx == 3 else 1))
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class StepsTwice(Regression):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        if batch_idx == 1:
            self.scheduler.step()
        return metrics


class Decays(Regression):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        with torch.no_grad():
            next(reversed(list(self.model.parameters()))).mul_(0.5)
        return metrics


class Renames(Regression):
    def evaluate_batch(self, batch: Any) -> Any:
        return {"val_loss": self.loss(batch)}


class Stops(Regression):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.context.set_stop_requested(batch_idx == 3)
        return super().train_batch(batch, epoch_idx, batch_idx)


class Unshuffled(Regression):
    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(super().build_training_data_loader().dataset, batch_size=4)


class Forgets(Regression):
    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        (callback,) = super().build_callbacks().values()
        callback.on_training_workload_end = lambda avg_metrics, batch_metrics: None  # type: ignore[method-assign]
        return {"average": callback}


@pytest.mark.parametrize(
    ("spoiled", "kind", "name", "batch", "cause"),
    [
        (DrawsMore, "metric", "loss", 2, "draws more random numbers"),
        (ScalesTheLoss, "gradient", "model.0.bias", 3, "scaled differently"),
        (StepsTwice, "learning rate", "group[0][0]", 3, "scheduler is stepped"),
        (Decays, "parameter", "model.3.bias", 0, "update differs"),
        (Renames, "validation metric", "validation_loss", 3, "reduced differently"),
        (Stops, "number of batches", "trained", 4, "stops earlier"),
        (Fails, "error", "ArithmeticError", 4, "ends with an error"),
        (Unshuffled, "data", "batch[0]", 0, ""),
        (Forgets, "callback state", "average.loss", 6, "callback has seen"),
    ],
)
def test_first_difference_has_a_cause(spoiled: type, kind: str, name: str, batch: int, cause: str) -> None:
    difference = differ(recorded(), record_ours(spoiled, SETTINGS))
    assert (difference.kind, difference.name, difference.batch) == (kind, name, batch)
    assert cause in difference.likely_cause
    assert f"{kind} {name}" in str(difference)


@pytest.mark.parametrize("trial", [Stops, Fails])
def test_recorder_alone_sees_the_same(trial: type, tmp_path: Path) -> None:
    log = recorder.TrainingLog()
    settings = dataclasses.asdict(SETTINGS)
    fit = {"checkpoint_storage": tmp_path / "checkpoints"}
    arguments = (recorder.record_trial(trial, pytorch, log), pytorch, settings, log)
    training = functools.partial(recorder.train, *arguments, {"Trainer": {"enable_progress_bar": False}, "fit": fit})
    alone = recorder.make_record("det_lightning", f"m:{trial.__name__}", settings, log, training)
    parsed = parse_record(json.loads(json.dumps(alone)), "the record")
    assert first_difference(parsed, record_ours(trial, SETTINGS), BIT_EQUAL) is None


def test_settings_come_first() -> None:
    difference = differ(recorded(), dataclasses.replace(recorded(), settings=dataclasses.replace(SETTINGS, seed=1)))
    assert (difference.kind, difference.name, difference.reference, difference.ours) == ("settings", "seed", 0, 1)


def number_of(event: Any) -> dict[str, Any]:
    return event["metrics"]["loss"]


@given(st.integers(0, 5), st.integers(1, 10_000))
def test_changed_number_is_found(batch: int, steps: int) -> None:
    ours = copy.deepcopy(recorded())
    changed = number_of(ours.select("batch_end")[batch])
    (bits,) = struct.unpack("<i", struct.pack("<f", changed["value"]))
    (changed["value"],) = struct.unpack("<f", struct.pack("<i", bits + steps))
    difference = differ(recorded(), ours)
    assert (difference.kind, difference.name, difference.batch) == ("metric", "loss", batch)
    assert difference.absolute == abs(difference.reference - difference.ours)


@given(st.integers(0, 5), st.floats(-0.5, 0.5))
def test_tolerance_hides_differences(batch: int, share: float) -> None:
    ours = copy.deepcopy(recorded())
    number_of(ours.select("batch_end")[batch])["value"] *= 1 + share
    one, other = (number_of(record.select("batch_end")[batch])["value"] for record in (recorded(), ours))
    allowed = abs(one - other) <= 0.1 * max(one, other)
    assert (first_difference(recorded(), ours, Tolerance(relative=0.1)) is None) == allowed


def test_nan_equals_only_itself(ours: TrainingRecord) -> None:
    number_of(ours.select("batch_end")[1])["value"] = math.nan
    assert first_difference(ours, copy.deepcopy(ours)) is None
    difference = differ(recorded(), ours)
    assert (difference.batch, difference.absolute) == (1, math.inf)


def test_digest_alone_tells_weights_apart(ours: TrainingRecord) -> None:
    ours.select("batch_end")[2]["weights"]["model.0.weight"]["digest"] = "0" * 16
    difference = differ(recorded(), ours)
    assert (difference.kind, difference.name, difference.batch) == ("parameter", "model.0.weight", 2)
    assert first_difference(recorded(), ours, Tolerance(relative=1e-6)) is None


def test_bits_count_in_one_environment() -> None:
    assert choose_tolerance(recorded(), recorded()) == BIT_EQUAL
    other = choose_tolerance(recorded_elsewhere(), recorded())
    assert (other.relative, other.absolute) == (1e-3, 1e-5)
    assert "torch 1.12.1 and" in other.reason


def test_missing_hooks_are_not_compared(ours: TrainingRecord) -> None:
    hook = "on_trial_startup"
    older = dataclasses.replace(ours, events=tuple(event for event in ours.events if event.get("name") != hook))
    assert first_difference(older, ours) is not None
    older.environment["hooks"].remove(hook)
    assert first_difference(older, recorded()) is None


def test_only_metrics_and_the_like_count_between_environments(ours: TrainingRecord) -> None:
    for event in ours.select("batch_end"):
        event["weights"]["model.0.bias"].update(norm=1.0, digest="0" * 16)
        event["random"]["torch"] = "0" * 16
    assert first_difference(recorded(), ours) is not None
    assert first_difference(recorded_elsewhere(), ours) is None
    number_of(ours.select("batch_end")[4])["value"] *= 1.5
    difference = differ(recorded_elsewhere(), ours)
    assert (difference.kind, difference.batch) == ("metric", 4)
    assert "drops other elements" in difference.likely_cause


def test_learning_rates_allow_a_millionth(ours: TrainingRecord) -> None:
    ours.select("batch_start")[2]["learning_rates"][0][0] *= 1 + 1e-5
    difference = differ(recorded_elsewhere(), ours)
    assert (difference.kind, difference.batch, difference.tolerance.relative) == ("learning rate", 2, 1e-6)


def test_difference_is_a_sentence() -> None:
    difference = Difference("metric", "loss", 3, 0.25, 0.5, absolute=0.25, relative=0.5)
    assert str(difference) == (
        "The first difference is the metric loss at batch 3: 0.25 in the reference, 0.5 here (0.25 apart, "
        "0.5 relative). Allowed: equal to the bit (same torch, device, processor and number of threads)."
    )
