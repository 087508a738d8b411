"""A small residual network for colour images of ten classes."""

from typing import Any

import data
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torchmetrics.classification import MulticlassAccuracy

from det_lightning import pytorch

CLASSES = 10
SHIFT = 2  # pixels by which training images are moved at most
VALIDATION_BATCH_SIZE = 250


class Block(nn.Module):
    """Two convolutions beside a shortcut; halves height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, kernel_size=1, stride=2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return relu(self.second(relu(self.first(images))) + self.shortcut(images))


def build_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        Block(width, width),
        Block(width, 2 * width),
        Block(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


def scale(images: torch.Tensor) -> torch.Tensor:
    """Turn bytes into numbers from -1 to 1."""
    return images.float() / 127.5 - 1


def vary(images: torch.Tensor) -> torch.Tensor:
    """Return training images moved by up to two pixels, and half of the time mirrored, all of a batch alike.

    torch's global generator decides. It is part of a checkpoint, so a resumed run varies its images as before.
    """
    down, right, mirrored = torch.randint(2 * SHIFT + 1, (3,)).tolist()
    framed = nn.functional.pad(images, [SHIFT] * 4, mode="replicate")
    size = images.shape[-1]
    moved = framed[:, :, down : down + size, right : right + size]
    return moved.flip(3) if mirrored % 2 else moved


class CifarTrial(pytorch.PyTorchTrial):
    """Hyperparameters: ``lr``, ``warmup_batches``, ``momentum``, ``weight_decay``, ``width``, ``global_batch_size``."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.training_set, self.validation_set, self.class_names = data.load(context.get_data_config()["source"])
        self.model = context.wrap_model(build_model(context.get_hparam("width")))
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(
                self.model.parameters(),
                lr=context.get_hparam("lr"),
                momentum=context.get_hparam("momentum"),
                weight_decay=context.get_hparam("weight_decay"),
                nesterov=True,
            )
        )
        warmup = context.get_hparam("warmup_batches")
        self.scheduler = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda batch: min((batch + 1) / warmup, (warmup / (batch + 1)) ** 0.5)
            ),
            step_mode=pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH,
        )
        metric = MulticlassAccuracy(num_classes=CLASSES, average="micro")
        self.accuracy = context.wrap_reducer(metric, name="accuracy", for_training=False)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        batch_size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self.training_set, batch_size=batch_size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.validation_set, batch_size=VALIDATION_BATCH_SIZE)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        loss = cross_entropy(self.model(scale(vary(images))), labels)
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda parameters: nn.utils.clip_grad_norm_(parameters, max_norm=5)
        )
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        logits = self.model(scale(images))
        self.accuracy.update(logits, labels)
        return {"validation_loss": cross_entropy(logits, labels)}
