"""What lets hours of training pass for nothing is said once, as a warning."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage
from tests.trials import SmallTrial


def fit(trial_class: type[SmallTrial] = SmallTrial, **kwargs: Any) -> SmallTrial:
    settings = {name: kwargs.pop(name) for name in ("hparams", "aggregation_frequency") if name in kwargs}
    with pytorch.init(enable_tensorboard_logging=False, **settings) as context:
        trial = trial_class(context)
        defaults: dict[str, Any] = {
            "max_length": pytorch.Batch(6),
            "reporting_period": pytorch.Batch(2),
            "checkpoint_policy": "none",
            "checkpoint_storage": "storage",
        }
        pytorch.Trainer(trial, context, enable_progress_bar=False).fit(**{**defaults, **kwargs})
    return trial


def warnings_in(caplog: pytest.LogCaptureFixture, pattern: str = "") -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in found if re.search(pattern, message)]


def test_an_ordinary_run_and_its_resume_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hparams = {"lr": 0.1, "layers": [1, 2], "api_token": "secret-1", "nested": {"a": (1, 2), "nan": math.nan}}
    fit(hparams=hparams, aggregation_frequency=3)
    fit(hparams=hparams, aggregation_frequency=3, latest_checkpoint="last", max_length=pytorch.Batch(8))
    assert warnings_in(caplog) == []


class NeverSteps(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {"loss": self.loss(batch)}


@pytest.mark.parametrize(("aggregation_frequency", "batches"), [(1, 2), (3, 4)])
def test_a_first_workload_without_an_optimizer_step(
    aggregation_frequency: int, batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one in which there is something to update."""
    fit(NeverSteps, aggregation_frequency=aggregation_frequency)
    (message,) = warnings_in(caplog)
    assert f"NeverSteps.train_batch() did not call context.step_optimizer() in the first {batches} batches" in message


class LosesItself(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        return {"loss": metrics["loss"] * (math.nan if batch_idx >= 3 else 1.0), "ratio": math.nan}


class ValidatesToNothing(SmallTrial):
    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": torch.tensor(math.nan)}


@pytest.mark.parametrize(
    ("trial_class", "found"),
    [
        (LosesItself, "The training metric 'loss' is NaN, first for batch 3 (the first one is 0)."),
        (ValidatesToNothing, "The validation metric 'validation_loss' is NaN after 3 batches."),
    ],
)
def test_a_loss_that_is_nan(trial_class: type[SmallTrial], found: str, caplog: pytest.LogCaptureFixture) -> None:
    fit(trial_class, validation_period=pytorch.Batch(3))
    (message,) = warnings_in(caplog)
    assert message.startswith(found)


@pytest.mark.parametrize(
    "period", ["checkpoint_period", "validation_period", "reporting_period"], ids=lambda name: name.split("_")[0]
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_period_below_one(period: str, value: int, caplog: pytest.LogCaptureFixture) -> None:
    periods: dict[str, Any] = {period: pytorch.Batch(value)}
    fit(**periods)
    (message,) = warnings_in(caplog)
    assert message.startswith(f"{period}=Batch({value}) is below 1, which means after every one")


def test_a_finished_run_that_is_resumed(caplog: pytest.LogCaptureFixture) -> None:
    fit()
    (checkpoint,) = CheckpointStorage("storage").list_ids()
    fit(latest_checkpoint="last")
    (message,) = warnings_in(caplog)
    assert f"max_length=Batch(6) is reached after 6 batches and 0 epochs (checkpoint {checkpoint})" in message


def test_a_resume_with_other_hyperparameters_says_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    fit(hparams={"lr": 0.1, "depth": 3, "optimizer": {"name": "adam", "beta": 0.9}, "api_token": "secret-1"})
    (checkpoint,) = CheckpointStorage("storage").list_ids()
    fit(
        hparams={"lr": 0.2, "width": 5, "optimizer": {"name": "adam", "beta": 0.8}, "api_token": "secret-2"},
        latest_checkpoint="last",
        max_length=pytorch.Batch(8),
    )
    assert warnings_in(caplog) == [
        f"The hparams differ from those of checkpoint {checkpoint}: lr was 0.1, and is 0.2; depth was 3, and is "
        "not given; optimizer.beta was 0.9, and is 0.8; width was not given, and is 5."
    ]


def test_best_without_a_metric_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    fit(checkpoint_policy="best", validation_period=pytorch.Batch(2))
    (message,) = warnings_in(caplog)
    assert "every validation is followed by a checkpoint" in message


def wrap_model(trial: SmallTrial) -> None:
    trial.context.wrap_model(torch.nn.Linear(1, 1))


def wrap_optimizer(trial: SmallTrial) -> None:
    trial.context.wrap_optimizer(torch.optim.SGD(trial.head.parameters(), lr=0.1))


def wrap_lr_scheduler(trial: SmallTrial) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(trial.sgd, 1)
    trial.context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.MANUAL_STEP)


@pytest.mark.parametrize("wrap", [wrap_model, wrap_optimizer, wrap_lr_scheduler], ids=lambda wrap: wrap.__name__)
def test_wrapping_in_train_batch_is_an_error(wrap: Callable[[SmallTrial], None], tmp_path: Path) -> None:
    class Wraps(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            wrap(self)

    with pytest.raises(errors.InvalidExperimentException, match=rf"{wrap.__name__}\(\) was called while the trial is"):
        fit(Wraps, checkpoint_storage=tmp_path)
    assert CheckpointStorage(tmp_path).list_ids() == []


def test_between_two_runs_a_trial_may_wrap_more() -> None:
    with pytorch.init(enable_tensorboard_logging=False) as context:
        trial = SmallTrial(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        trainer.fit(max_length=pytorch.Batch(2), checkpoint_policy="none", checkpoint_storage="storage")
        wrap_model(trial)
        trainer.fit(max_length=pytorch.Batch(2), checkpoint_policy="none", checkpoint_storage="storage")
    assert len(context.models) == 3
