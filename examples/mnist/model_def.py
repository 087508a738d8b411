"""A small convolutional network for handwritten digits of 28 by 28 pixels."""

from typing import Any

import data
import torch
from torch import nn

from det_lightning import pytorch

VALIDATION_BATCH_SIZE = 120  # divides the 360 images of scikit-learn and the 10,000 of MNIST nearly


def build_model(filters: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, filters, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(filters, 2 * filters, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * filters * 5 * 5, 10),
    )


class MnistTrial(pytorch.PyTorchTrial):
    """Hyperparameters: ``lr``, ``filters``, ``dropout``, ``global_batch_size``. Data: ``source``, see data.py."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        network = build_model(context.get_hparam("filters"), context.get_hparam("dropout"))
        self.model = context.wrap_model(network)
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr")))
        self.training_set, self.validation_set = data.load(context.get_data_config()["source"])
        # The share of all images, however many are in a batch and on a process.
        self.accuracy = context.wrap_reducer(share, name="accuracy", for_training=False)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.training_set, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.validation_set, batch_size=VALIDATION_BATCH_SIZE)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        logits = self.model(images)
        self.accuracy.update((logits.argmax(dim=1) == labels).tolist())
        return {"validation_loss": nn.functional.cross_entropy(logits, labels)}


def share(batches: list[list[bool]]) -> float:
    """Return the share of what is true in all batches."""
    values = [value for batch in batches for value in batch]
    return sum(values) / len(values)
