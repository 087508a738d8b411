"""A small convolutional network for scikit-learn's handwritten digits."""

from typing import Any

import numpy as np
import torch
from history import History
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from det_lightning import pytorch

SPLIT_SEED = 0
VALIDATION_SIZE = 360
VALIDATION_BATCH_SIZE = 120  # divides 360, so the mean over batches is the mean over images


def load_split() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images for training and 360 for validation, always the same ones."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(SPLIT_SEED).permutation(len(images))
    pixels = torch.tensor(images[order] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    classes = torch.tensor(labels[order])
    return (
        TensorDataset(pixels[VALIDATION_SIZE:], classes[VALIDATION_SIZE:]),
        TensorDataset(pixels[:VALIDATION_SIZE], classes[:VALIDATION_SIZE]),
    )


def build_model(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(128, 10),
    )


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).float().mean()


class DigitsTrial(pytorch.PyTorchTrial):
    """Hyperparameters: ``lr``, ``lr_decay`` (per epoch), ``dropout``, ``global_batch_size``."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(build_model(context.get_hparam("dropout")))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr")))
        self.scheduler = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=context.get_hparam("lr_decay")),
            step_mode=pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )
        self.training_set, self.validation_set = load_split()
        self.history = History()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.training_set, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.validation_set, batch_size=VALIDATION_BATCH_SIZE)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"history": self.history}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        logits = self.model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "accuracy": accuracy(logits, labels)}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        logits = self.model(images)
        return {
            "validation_loss": nn.functional.cross_entropy(logits, labels),
            "validation_accuracy": accuracy(logits, labels),
        }
