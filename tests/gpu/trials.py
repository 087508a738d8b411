"""A trial whose batches must not wait for the GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from det_lightning import pytorch

BATCHES, BATCH_SIZE = 60, 32


class OnGpu(pytorch.PyTorchTrial):
    """A model with a batch norm, on data that lie on the GPU, with clipping.

    From batch ``warm_up`` on, when libraries are loaded and optimizers have made their state, it is an error to wait
    for the device; after every ``period`` batches a report waits.
    """

    make_optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.Adam, fused=True)
    waits = False
    warm_up = 3
    period = BATCHES
    samples = BATCHES * BATCH_SIZE

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.losses: list[torch.Tensor] = []
        self.scaler: Any = None
        torch.manual_seed(0)
        self.build()

    def build(self) -> None:
        layers = [torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
        self.model = self.context.wrap_model(torch.nn.Sequential(*layers))
        self.optimizer = self.context.wrap_optimizer(type(self).make_optimizer(self.model.parameters(), lr=0.01))

    def make_data(self) -> torch.utils.data.TensorDataset:
        inputs = torch.randn(self.samples, 16, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def make_loader(self) -> pytorch.DataLoader:
        tensors = [tensor.to(self.context.device) for tensor in self.make_data().tensors]
        return pytorch.DataLoader(torch.utils.data.TensorDataset(*tensors), BATCH_SIZE)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self.make_loader()

    build_validation_data_loader = build_training_data_loader

    def loss(self, batch: Any) -> torch.Tensor:
        return ((self.model(batch[0]) - batch[1]) ** 2).mean()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx >= self.warm_up and not self.waits:
            torch.cuda.set_sync_debug_mode("error")
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.context.backward(loss if self.scaler is None else self.scaler.scale(loss))
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        clip = lambda p: torch.nn.utils.clip_grad_norm_(p, 10.0)  # noqa: E731
        self.context.step_optimizer(self.optimizer, clip_grads=clip, scaler=self.scaler)
        if self.scaler is not None:
            self.scaler.update()
        if (batch_idx + 1) % self.period == 0:
            torch.cuda.set_sync_debug_mode("default")
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": self.loss(batch)}


def train(kind: type[OnGpu], storage: Path, **lightning: Any) -> OnGpu:
    with pytorch.init(exp_conf={"name": "gpu"}, enable_tensorboard_logging=False) as context:
        trial = kind(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False, **lightning)
        periods: dict[str, Any] = {"max_length": pytorch.Batch(BATCHES), "reporting_period": pytorch.Batch(kind.period)}
        try:
            trainer.fit(checkpoint_policy="none", checkpoint_storage=storage, **periods)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return trial


def curve(trial: OnGpu) -> torch.Tensor:
    return torch.stack(trial.losses).float().cpu()
