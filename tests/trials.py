"""A small trial with everything in it that makes a resume hard; tests vary it by subclassing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from det_lightning import pytorch
from det_lightning.pytorch import _random_state

SAMPLES, BATCH_SIZE = 50, 8
EPOCH_LEN = -(-SAMPLES // BATCH_SIZE)


def seed_everything(seed: int = 3) -> None:
    _random_state.seed_everything(seed)


def make_data() -> torch.utils.data.TensorDataset:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


class CountingCallback(pytorch.PyTorchCallback):
    """Its state changes the training: lost over a checkpoint, the weights would differ."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class SmallTrial(pytorch.PyTorchTrial):
    """Two models with dropout, two optimizers, two schedulers, shuffling, and draws from every random generator."""

    num_workers = 0

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.body = context.wrap_model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3)))
        self.head = context.wrap_model(torch.nn.Linear(8, 1))
        self.adam = context.wrap_optimizer(torch.optim.Adam(self.body.parameters(), lr=0.01))
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.02, momentum=0.9))
        mode = pytorch.LRScheduler.StepMode
        context.wrap_lr_scheduler(torch.optim.lr_scheduler.StepLR(self.adam, 2, 0.5), mode.STEP_EVERY_EPOCH)
        context.wrap_lr_scheduler(torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.99), mode.STEP_EVERY_BATCH)
        self.counter = CountingCallback()

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True, num_workers=self.num_workers)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=16)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"counter": self.counter}

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return ((self.head(self.body(inputs)) - targets) ** 2).mean()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        noise = 1 + 0.01 * (random.random() + float(np.random.rand())) + 0.1 * self.counter.epochs
        loss = self.loss(batch) * noise
        self.context.backward(loss)
        self.context.step_optimizer(self.sgd, clip_grads=lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0))
        self.context.step_optimizer(self.adam)
        return {"loss": loss, "batch": batch_idx}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch)}


def failing_at(failing_idx: int, error: Exception, trial_class: type[SmallTrial] = SmallTrial) -> type[SmallTrial]:
    """Return a trial that raises an error before it trains on a batch."""

    class Failing(trial_class):  # type: ignore[misc,valid-type]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            if batch_idx == failing_idx:
                raise error
            return super().train_batch(batch, epoch_idx, batch_idx)

    return Failing


def weights_of(trial: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for model in trial.context.models for p in model.parameters()])


def fit_trial(trial_class: Callable[..., Any] = SmallTrial, callbacks: Any = None, **arguments: Any) -> Any:
    """Train by arguments of ``init`` and ``fit``, by default four batches and into ``storage``; return the trial."""
    names = arguments.keys() & {"hparams", "exp_conf", "aggregation_frequency"}
    of_init = {name: arguments.pop(name) for name in names}
    if "checkpoints" not in arguments:
        arguments = {"checkpoint_policy": "none", "checkpoint_storage": "storage", **arguments}
    with pytorch.init(enable_tensorboard_logging=False, **of_init) as context:
        trial = trial_class(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False, callbacks=callbacks)
        trainer.fit(**{"max_length": pytorch.Batch(4), **arguments})
    return trial
