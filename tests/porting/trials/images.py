"""One model, a scheduler that steps every epoch, as in the examples for images."""

from collections.abc import Sequence
from typing import Any, Union, cast

import determined as det
import torch
import torch.nn.functional as functional
from determined.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext
from torch import nn
from torch.utils.data import TensorDataset

TorchData = Union[dict[str, torch.Tensor], Sequence[torch.Tensor], torch.Tensor]


def make_images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    images = torch.randn(count, 1, 6, 6, generator=generator) + labels[:, None, None, None]
    return TensorDataset(images, labels)


class ImagesTrial(PyTorchTrial):
    """Small convolutional network."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        # Every rank has data of its own.
        self.seed = self.context.distributed.get_rank()
        self.model = self.context.wrap_model(
            nn.Sequential(
                nn.Conv2d(1, self.context.get_hparam("filters"), 3),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(16 * self.context.get_hparam("filters"), 3),
            )
        )
        self.optimizer = self.context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=self.context.get_hparam("lr"), momentum=0.9)
        )
        self.scheduler = self.context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5),
            step_mode=LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(make_images(30, self.seed), batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(make_images(20, 1), batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = cast(Sequence[torch.Tensor], batch)
        loss = functional.cross_entropy(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: TorchData) -> dict[str, Any]:
        images, labels = cast(Sequence[torch.Tensor], batch)
        output = self.model(images)
        accuracy = (output.argmax(dim=1) == labels).float().mean()
        return {"validation_loss": functional.cross_entropy(output, labels), "accuracy": accuracy.item()}


def fit(directory: str) -> None:
    with det.pytorch.init(hparams={"filters": 2, "lr": 0.1, "global_batch_size": 8}) as context:
        trainer = det.pytorch.Trainer(ImagesTrial(context), context)
        trainer.fit(max_length=det.pytorch.Batch(5))
