"""Trials for both sides, made from the API module of a side."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

SAMPLES, BATCH = 22, 4
EPOCH_LEN = 6


def make_data(samples: int = SAMPLES) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def basic(api: Any) -> type:
    """One model with dropout, Adam, shuffled data."""

    class Basic(api.PyTorchTrial):
        shuffle, num_workers, drop_last = True, 0, False

        def __init__(self, context: Any) -> None:
            self.context = context
            network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout(0.2), torch.nn.Linear(5, 1))
            self.model = context.wrap_model(network)
            self.optimizer = context.wrap_optimizer(self.make_optimizer(self.model.parameters()))

        def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, lr=0.01)

        def build_training_data_loader(self) -> Any:
            return api.DataLoader(
                make_data(),
                batch_size=BATCH,
                shuffle=self.shuffle,
                num_workers=self.num_workers,
                drop_last=self.drop_last,
            )

        def build_validation_data_loader(self) -> Any:
            return api.DataLoader(make_data(10), batch_size=BATCH)

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

    return Basic


def drawing(api: Any) -> type:
    """Draws from every global generator in each step."""

    class Drawing(basic(api)):  # type: ignore[misc]
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) * (1 + random.random() + float(np.random.rand()) + torch.rand(()))

    return Drawing


def adversarial(api: Any) -> type:
    """Two models and two optimizers that step in alternating order."""

    class Adversarial(basic(api)):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            self.context = context
            self.generator = context.wrap_model(torch.nn.Linear(3, 3))
            self.critic = context.wrap_model(torch.nn.Linear(3, 1))
            self.g_optimizer = context.wrap_optimizer(torch.optim.SGD(self.generator.parameters(), 0.01, momentum=0.9))
            self.c_optimizer = context.wrap_optimizer(torch.optim.AdamW(self.critic.parameters(), 0.01))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            real = batch[0]
            fake = self.generator(torch.randn_like(real))
            c_loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
            g_loss = -self.critic(fake).mean()
            steps = [(c_loss, self.c_optimizer), (g_loss, self.g_optimizer)]
            for loss, _ in steps if batch_idx % 2 else steps[::-1]:
                self.context.backward(loss, retain_graph=True)
            for _, optimizer in steps:
                self.context.step_optimizer(optimizer)
            return {"g_loss": g_loss, "c_loss": c_loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"score": self.critic(batch[0]).mean()}

    return Adversarial


def full_dataset(api: Any) -> type:
    """Validates on all of the data at once."""

    class FullDataset(basic(api)):  # type: ignore[misc]
        evaluate_batch = api.PyTorchTrial.evaluate_batch

        def evaluate_full_dataset(self, data_loader: Any) -> Any:
            losses = [self.loss(batch) for batch in data_loader]
            return {"validation_loss": sum(losses) / len(losses), "batches_seen": len(losses)}

    return FullDataset


def uneven(api: Any) -> type:
    """Of its three validation batches one rank gets two; each way of reducing is there."""

    class Uneven(basic(api)):  # type: ignore[misc]
        def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return {"avg": loss, "sum": loss * 2, "max": loss + batch_idx, "min": loss - batch_idx}

        def evaluation_reducer(self) -> Any:
            kind = api.Reducer
            return {"avg": kind.AVG, "sum": kind.SUM, "max": kind.MAX, "min": kind.MIN}

    return Uneven


def one_batch(api: Any) -> type:
    """A pass over the training data is one batch, less than one for each rank."""

    class OneBatch(basic(api)):  # type: ignore[misc]
        def build_training_data_loader(self) -> Any:
            return api.DataLoader(make_data(BATCH), batch_size=BATCH, shuffle=True)

    return OneBatch


def reducing(api: Any) -> type:
    """Metrics over all batches and ranks together, whose order shows."""

    class Reducing(basic(api)):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.in_order = context.wrap_reducer(lambda values: {"first": values[0], "last": values[-1]})
            self.spread = context.wrap_reducer(lambda values: float(np.dot(values, np.arange(len(values)))), name="dot")

        def loss(self, batch: Any) -> torch.Tensor:
            for reducer in (self.in_order, self.spread):
                reducer.update(float(batch[0].sum()))
            return super().loss(batch)

    return Reducing
