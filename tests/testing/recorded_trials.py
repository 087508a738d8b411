"""A trial to record, and ways to spoil it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from det_lightning import pytorch
from det_lightning.testing.records.record import RunSettings, TrainingRecord
from det_lightning.testing.training.reference import record_ours

SETTINGS = RunSettings(hparams={"lr": 0.05, "global_batch_size": 4}, batches=6, validation_period=3, reporting_period=2)


def make_data(samples: int) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Average(pytorch.PyTorchCallback):
    """Keeps a moving average, in its checkpoint too."""

    def __init__(self) -> None:
        self.loss = 0.0

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.loss += 0.1 * (float(avg_metrics["loss"]) - self.loss)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}


class Regression(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, width: int = 5) -> None:
        self.context = context
        layers = [torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2)]
        self.model = context.wrap_model(torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), context.get_hparam("lr")))
        self.scheduler = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, 2), pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH
        )

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(18), batch_size=4, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(10), batch_size=4)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"average": Average()}

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return ((self.model(inputs) - targets) ** 2).mean()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": self.loss(batch)}


class Fails(Regression):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 4:
            raise ArithmeticError("the loss is not what it was")
        return super().train_batch(batch, epoch_idx, batch_idx)


@functools.cache
def recorded() -> TrainingRecord:
    """Return a record of the trial; tests change only copies of it."""
    return record_ours(Regression, SETTINGS)


def write_record(record: TrainingRecord, path: Path) -> None:
    path.write_text(json.dumps(record.content()))
