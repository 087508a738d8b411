"""Reports of workloads: complete before anything else is due, and after one more batch where metrics are on a GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from det_lightning.engine import train_and_evaluate
from det_lightning.engine.metrics import MetricTransfer, MetricWindow
from tests.lightning import fit, pl
from tests.trials import SmallTrial

AT_ONCE = ["train 0", "train 1", "report 2", "train 2", "train 3", "report 4", "train 4", "train 5", "report 6"]
AFTER_ONE_MORE = ["train 0", "train 1", "train 2", "report 2", "train 3", "train 4", "report 4", "train 5", "report 6"]


class OnGpu(MetricWindow):
    """A window whose metrics come over beside the work of a device."""

    def begin_transfer(self) -> MetricTransfer:
        transfer = super().begin_transfer()
        transfer.runs_aside = True
        return transfer


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_and_evaluate, "MetricWindow", OnGpu)


class Recorded(SmallTrial):
    fails_at: int | None = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.happened: list[str] = []
        self.reported: list[dict[str, Any]] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.happened.append(f"train {batch_idx}")
        if batch_idx == self.fails_at:
            raise ValueError("no such batch")
        return super().train_batch(batch, epoch_idx, batch_idx)


class Watched(Recorded, pytorch.PyTorchCallback):
    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """See nothing."""

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"watch": self}


class Reduced(Recorded):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.wrap_reducer(len, name="length")


class Failing(Recorded):
    fails_at = 2


class ToTrial(pl.Callback):
    """Passes what is reported on to the trial itself."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.module = pl_module
        pl_module.reporters.append(self)

    def report_training(self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[Any]) -> None:
        self.module.trial.happened.append(f"report {steps_completed}")
        self.module.trial.reported.append({**avg_metrics, "count": len(batch_metrics)})

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.module.trial.happened.append(f"validate {steps_completed}")


def train(trial_class: type[Recorded] = Recorded, **periods: Any) -> Any:
    module = TrialModule(trial_class, max_length=pytorch.Batch(6), reporting_period=pytorch.Batch(2), **periods)
    fails = trial_class.fails_at is not None
    with pytest.raises(ValueError, match="no such batch") if fails else contextlib.nullcontext():
        fit(module, callbacks=[ToTrial()])
    return module.trial


def training_of(trial: Recorded) -> list[str]:
    return [entry for entry in trial.happened if not entry.startswith("validate")]


def test_reports_follow_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = train()
    assert training_of(at_once) == AT_ONCE
    assert len(at_once.reported) == 3
    monkeypatch.setattr(train_and_evaluate, "MetricWindow", OnGpu)
    late = train()
    assert training_of(late) == AFTER_ONE_MORE
    assert late.reported == at_once.reported


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("trial_class", [Watched, Reduced])
def test_users_code_runs_first(trial_class: type[Recorded]) -> None:
    assert training_of(train(trial_class)) == AT_ONCE


@pytest.mark.usefixtures("on_gpu")
def test_validations_follow_reports() -> None:
    trial = train(validation_period=pytorch.Batch(2))
    assert trial.happened[:4] == ["train 0", "train 1", "report 2", "validate 2"]


@pytest.mark.usefixtures("on_gpu")
def test_a_failing_batch_follows_a_report() -> None:
    assert train(Failing).happened == ["train 0", "train 1", "train 2", "report 2"]
