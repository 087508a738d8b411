"""Trials for both sides, made from the API module of a side."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SAMPLES, BATCH = 22, 4
EPOCH_LEN = 6


def make_data(samples: int = SAMPLES) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Trial:
    """A trial of either side, whose ``api`` is ``pytorch`` there; see :func:`of_side`."""

    api: Any

    def __init__(self, context: Any) -> None:
        self.context = context


def of_side(api: Any, trial: type[Trial]) -> type:
    return type(trial.__name__, (trial, api.PyTorchTrial), {"api": api, "__module__": trial.__module__})


class Training(Trial):
    """One model with dropout, Adam, shuffled data; without an evaluation."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout(0.2), torch.nn.Linear(5, 1))
        self.model = context.wrap_model(network)
        self.optimizer = context.wrap_optimizer(self.make_optimizer(self.model.parameters()))

    def make_optimizer(self, parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=0.01)

    def build_training_data_loader(self) -> Any:
        return self.api.DataLoader(make_data(), batch_size=BATCH, shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return self.api.DataLoader(make_data(10), batch_size=BATCH)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return ((self.model(inputs) - targets) ** 2).mean()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class Basic(Training):
    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": self.loss(batch)}


def callback(api: Any, **methods: Any) -> Any:
    """Return a callback with these methods, which get no ``self``."""
    static = {name: staticmethod(method) for name, method in methods.items()}
    return type("Callback", (api.PyTorchCallback,), static)()


def calling(base: type[Basic] = Basic, **hooks: Any) -> type[Basic]:
    """Return a trial with a callback whose hooks are these functions, which get no ``self``."""

    class Calling(base):  # type: ignore[misc, valid-type]
        def build_callbacks(self) -> dict[str, Any]:
            return {"calls": callback(self.api, **hooks)}

    return Calling


def changed(**methods: Any) -> type[Basic]:
    return type("Changed", (Basic,), methods)


def built(build: Callable[[Any], Any], base: type[Training] = Basic) -> type[Basic]:
    """Return a trial whose ``__init__`` ends with ``build(trial)``."""

    class Built(base):  # type: ignore[misc, valid-type]
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            build(self)

    return Built


def schedule(trial: Any, scheduler: Any, mode: str = "MANUAL_STEP", **frequency: Any) -> Any:
    return trial.context.wrap_lr_scheduler(scheduler, trial.api.LRScheduler.StepMode[mode], **frequency)


class Drawing(Basic):
    """Draws from every global generator in each step."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (1 + random.random() + float(np.random.rand()) + torch.rand(()))


class Adversarial(Basic):
    """Two models and two optimizers that step in alternating order."""

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


class FullDataset(Training):
    """Validates on all of the data at once."""

    def evaluate_full_dataset(self, data_loader: Any) -> Any:
        losses = [self.loss(batch) for batch in data_loader]
        return {"validation_loss": sum(losses) / len(losses), "batches_seen": len(losses)}


class Uneven(Basic):
    """Of its three validation batches one rank gets two; each way of reducing is there."""

    def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"avg": loss, "sum": loss * 2, "max": loss + batch_idx, "min": loss - batch_idx}

    def evaluation_reducer(self) -> Any:
        kind = self.api.Reducer
        return {"avg": kind.AVG, "sum": kind.SUM, "max": kind.MAX, "min": kind.MIN}


class OneBatch(Basic):
    """A pass over the training data is one batch, less than one for each rank."""

    def build_training_data_loader(self) -> Any:
        return self.api.DataLoader(make_data(BATCH), batch_size=BATCH, shuffle=True)


class Reducing(Basic):
    """Metrics over all batches and ranks together, whose order shows."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.in_order = context.wrap_reducer(lambda values: {"first": values[0], "last": values[-1]})
        self.spread = context.wrap_reducer(lambda values: float(np.dot(values, np.arange(len(values)))), name="dot")

    def loss(self, batch: Any) -> torch.Tensor:
        for reducer in (self.in_order, self.spread):
            reducer.update(float(batch[0].sum()))
        return super().loss(batch)
