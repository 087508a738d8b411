"""Boundaries, epochs and random draws: events, numbers and checkpoints are those of Determined 0.38.1."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.sides import SIDES, Trace, assert_same, compare, epoch, recorded, seed
from tests.conformance.trials import BATCH, EPOCH_LEN, Adversarial, Basic, Drawing, built, callback, changed, make_data


@pytest.mark.parametrize("policy", ["all", "best", "none"])
@pytest.mark.parametrize("reporting", [1, 4, 100])
def test_reports_and_checkpoints_come_at_the_same_batches(policy: str, reporting: int) -> None:
    """Without a metric to compare, "best" falls back to "all" on both sides."""
    compare(Basic, max_length=13, validation_period=5, reporting_period=reporting, checkpoint_policy=policy)


@pytest.mark.parametrize(
    "fit",
    [
        {"max_length": 1},
        {"max_length": 0},
        {"max_length": epoch(2)},
        {"max_length": epoch(2), "validation_period": epoch(1), "checkpoint_period": epoch(2)},
        {"max_length": epoch(1), "validation_period": 4, "checkpoint_period": 4},
        {"max_length": 14, "validation_period": epoch(1), "checkpoint_period": 5},
        {"max_length": 12, "checkpoint_period": 12, "validation_period": 7},
        {"max_length": 9, "validation_period": [2, 3, 8]},
        {"max_length": 9, "checkpoint_period": (1, 9), "validation_period": {4}},
        {"max_length": epoch(3), "validation_period": epoch([2]), "checkpoint_period": epoch(range(1, 3))},
        {"max_length": 4, "validation_period": 0, "checkpoint_period": 2},
        {"max_length": epoch(2), "validation_period": epoch(0)},
        {"max_length": 15, "reporting_period": epoch(1)},
        {"max_length": 8, "reporting_period": [3, 5]},
        {"max_length": 8, "validation_period": np.array([2, 5]), "reporting_period": None},
        {"max_length": 7, "validation_period": range(0, 100, 3), "checkpoint_period": {2: "x"}},
    ],
)
def test_lengths_and_periods_mean_the_same(fit: dict[str, Any]) -> None:
    compare(Basic, **{"checkpoint_policy": "none", **fit})


@pytest.mark.parametrize("step_zero", [False, True])
@pytest.mark.parametrize("test_mode", [False, True])
def test_test_mode_and_step_zero_train_the_same(step_zero: bool, test_mode: bool) -> None:
    compare(Basic, max_length=7, step_zero_validation=step_zero, test_mode=test_mode, checkpoint_policy="all")


@pytest.mark.parametrize("loader", [{"num_workers": 2}, {"shuffle": False}, {"drop_last": True}], ids=str)
def test_loader_arguments_load_the_same_batches(loader: dict[str, Any]) -> None:
    class Loading(Basic):
        def build_training_data_loader(self) -> Any:
            return self.api.DataLoader(make_data(), **{"batch_size": BATCH, "shuffle": True, **loader})

    compare(Loading, max_length=2 * EPOCH_LEN + 1, validation_period=5, checkpoint_policy="none")


@pytest.mark.parametrize("trial", [Drawing, Adversarial])
def test_several_models_draw_and_train_the_same(trial: Any) -> None:
    compare(trial, max_length=15, validation_period=4, checkpoint_period=6)


@pytest.mark.parametrize("hook", ["on_training_workload_end", "on_validation_end", "on_checkpoint_upload_end"])
@pytest.mark.parametrize(
    "fit",
    [
        {"validation_period": 3, "checkpoint_period": 2},
        {"validation_period": 2, "checkpoint_period": 2},
        {"checkpoint_period": 4, "reporting_period": 3},
        {"max_length": 6, "validation_period": 6, "checkpoint_period": 6},
    ],
    ids=str,
)
def test_stop_request_stops_at_the_same_batch(hook: str, fit: dict[str, Any]) -> None:
    class Stops(Basic):
        def build_callbacks(self) -> dict[str, Any]:
            def stop(*args: Any, **kwargs: Any) -> None:
                self.context.set_stop_requested(True)

            return {"stop": callback(self.api, **{hook: stop})}

    compare(Stops, **{"max_length": 20, "checkpoint_policy": "none", **fit})


def test_stop_request_in_a_batch_stops_after_it() -> None:
    class Stops(Basic):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 4:
                self.context.set_stop_requested(True)
            return super().train_batch(batch, epoch_idx, batch_idx)

    compare(Stops, max_length=20, reporting_period=3, checkpoint_policy="none")


def test_position_can_be_asked_for() -> None:
    class Asks(Basic):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            context = self.context
            asked = [context.current_train_batch(), context.current_train_epoch(), context.get_initial_batch()]
            asked += [context.is_epoch_start(), context.is_epoch_end()]
            return {**super().train_batch(batch, epoch_idx, batch_idx), **{f"q{i}": a for i, a in enumerate(asked)}}

    compare(Asks, max_length=epoch(2), checkpoint_policy="none")


def test_earlier_gradients_count() -> None:
    compare(built(lambda trial: trial.model(torch.ones(1, 3)).sum().backward()), max_length=3)


# One batch, tried out

CONFIG = {"hyperparameters": {"global_batch_size": 4}, "data": {"folder": "images"}, "searcher": {"metric": "loss"}}


def tried_out(side: str, trial: type[Basic]) -> Trace:
    trace = Trace()
    trial_class = recorded(trial, importlib.import_module(f"{side}.pytorch"), trace)
    seed(3)
    importlib.import_module(f"{side}.experimental").test_one_batch(trial_class, CONFIG)
    return trace


@pytest.mark.filterwarnings("ignore")
def test_one_batch_goes_the_whole_way() -> None:
    def look(trial: Any) -> None:
        assert trial.context.get_per_slot_batch_size() == 4
        assert trial.context.get_data_config() == {"folder": "images"}

    real, ours = (tried_out(side, built(look)) for side in SIDES)
    # Ours has the configuration before the trial is built, and so does what it saves.
    for trace in (real, ours):
        trace.checkpoints[0].pop("load_data")
    assert_same(real, ours)
    assert len(ours.named("train_batch")) == 1


def test_nothing_is_left_behind() -> None:
    before = set(Path.cwd().iterdir())
    tried_out("det_lightning", Basic)
    assert set(Path.cwd().iterdir()) == before


@pytest.mark.parametrize("side", SIDES)
def test_errors_of_a_trial_come_out(side: str) -> None:
    with pytest.raises(ZeroDivisionError):
        tried_out(side, changed(evaluate_batch=lambda self, batch: 1 / 0))
