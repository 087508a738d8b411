from typing import Any

import torch
from attrdict import AttrDict
from data import moons
from determined.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext
from torch import nn


class MoonsTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = AttrDict(context.get_hparams())
        hidden = self.hparams.hidden
        self.model = self.context.wrap_model(
            nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))
        )
        self.optimizer = self.context.wrap_optimizer(
            torch.optim.Adam(self.model.parameters(), lr=self.hparams.learning_rate)
        )
        self.scheduler = self.context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.8),
            step_mode=LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(moons(512, seed=1), batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(moons(256, seed=2), batch_size=64)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        points, labels = batch
        loss = nn.functional.cross_entropy(self.model(points), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        points, labels = batch
        output = self.model(points)
        error = (output.argmax(dim=1) != labels).float().mean()
        return {"validation_loss": nn.functional.cross_entropy(output, labels), "validation_error": error}
