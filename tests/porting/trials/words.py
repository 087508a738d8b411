"""Gradients are clipped, a scheduler steps every batch and another by hand, as in the examples for language."""

import logging
import math
from typing import Any

import torch
from determined.pytorch import (
    DataLoader,
    LRScheduler,
    PyTorchTrial,
    PyTorchTrialContext,
    Reducer,
    TorchData,
)
from torch import nn


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


class Words(torch.utils.data.Dataset):
    def __init__(self, length: int) -> None:
        self.data = torch.randint(10, (length,), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.data) - 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"text": self.data[index : index + 4], "target": self.data[index + 4]}


class WordsTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = AttributeDict(self.context.get_hparams())
        self.embedding = self.context.wrap_model(nn.Embedding(10, self.hparams.size))
        self.decoder = self.context.wrap_model(nn.LSTM(self.hparams.size, 10, batch_first=True))
        parameters = [*self.embedding.parameters(), *self.decoder.parameters()]
        self.optimizer = self.context.wrap_optimizer(torch.optim.AdamW(parameters, lr=self.hparams.lr))
        self.warmup = self.context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 6)),
            LRScheduler.StepMode.STEP_EVERY_BATCH,
            frequency=2,
        )
        self.decay = self.context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9), LRScheduler.StepMode.MANUAL_STEP
        )
        self.loss = nn.CrossEntropyLoss()
        logging.info("Clipping at %s", self.hparams.clip)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(Words(40), batch_size=self.context.get_per_slot_batch_size(), drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(Words(20), batch_size=self.context.get_per_slot_batch_size())

    def compute_loss(self, batch: TorchData) -> torch.Tensor:
        output, _ = self.decoder(self.embedding(batch["text"]))
        return self.loss(output[:, -1], batch["target"])

    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> torch.Tensor:
        loss = self.compute_loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer,
            clip_grads=lambda params: torch.nn.utils.clip_grad_norm_(params, self.context.get_hparam("clip")),
        )
        if self.context.is_epoch_end():
            self.decay.step()
        return loss

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> dict[str, Any]:
        loss = self.compute_loss(batch)
        return {"loss": loss.item(), "perplexity": math.exp(loss.item())}

    def evaluation_reducer(self) -> dict[str, Reducer]:
        return {"loss": Reducer.AVG, "perplexity": Reducer.MAX}
