"""A digits classifier with everything that makes an exact resume hard."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from det_lightning import pytorch

StepMode = pytorch.LRScheduler.StepMode


class StopAfter(pytorch.PyTorchCallback):
    """Request a stop after a number of batches; None for never."""

    def __init__(self, context: pytorch.PyTorchTrialContext, batches: int | None) -> None:
        self.context = context
        self.batches = batches

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        if avg_metrics["batches"] == self.batches:
            self.context.set_stop_requested(True)


class TwoPartTrial(pytorch.PyTorchTrial):
    """Shuffled data, dropout, and two models with an optimizer (with momentum) and a scheduler each."""

    def __init__(self, context: pytorch.PyTorchTrialContext, stop_after: int | None = None) -> None:
        self.context = context
        self.stop_after = stop_after
        self.body = context.wrap_model(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5)))
        self.head = context.wrap_model(nn.Linear(64, 10))
        self.adam = context.wrap_optimizer(torch.optim.Adam(self.body.parameters(), lr=0.01))
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9))
        per_batch = torch.optim.lr_scheduler.CosineAnnealingLR(self.adam, T_max=200)
        per_epoch = torch.optim.lr_scheduler.ExponentialLR(self.sgd, gamma=0.8)
        context.wrap_lr_scheduler(per_batch, StepMode.STEP_EVERY_BATCH)
        context.wrap_lr_scheduler(per_epoch, StepMode.STEP_EVERY_EPOCH)
        pixels, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
        self.training_set, self.validation_set = torch.utils.data.random_split(
            data, [1437, 360], generator=torch.Generator().manual_seed(0)
        )

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.training_set, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.validation_set, batch_size=120)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"stop": StopAfter(self.context, self.stop_after)}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        pixels, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.body(pixels)), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.adam)
        self.context.step_optimizer(self.sgd)
        return loss

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        pixels, labels = batch
        return {"accuracy": (self.head(self.body(pixels)).argmax(dim=1) == labels).float().mean()}
