"""Trials of tests/distributed/test_fsdp.py, whose weights are compared as a whole."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from det_lightning import pytorch
from tests.distributed import ranks


def whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached.clone()


class Plain(ranks.Plain):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.train_on(batch)
        if self.context.is_update_batch():
            self.updates.append(weights_of(self))
        return {"loss": loss}


def weights_of(trial: ranks.Plain) -> torch.Tensor:
    return torch.cat([whole(p).reshape(-1) for model in trial.context.models for p in model.parameters()])


class Gan(Plain, ranks.Gan):
    pass


class Orders(Plain, ranks.Orders):
    pass


class Frozen(Plain, ranks.Frozen):
    pass


class Clipped(Plain):
    def train_on(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5))
        return loss


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 3) for _ in range(3)])
        self.out = torch.nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.out(self.layers[branch](inputs))


class Unused(Plain):
    """The first half of each global batch goes through one layer, the second through another; a third is not used."""

    def wrap(self) -> None:
        self.model = self.context.wrap_model(Branches())
        self.optimizer = self.context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), 0.05))

    def loss(self, batch: Any) -> torch.Tensor:
        rank, size = self.context.distributed.rank, self.context.distributed.size
        inputs, targets = batch
        halves = [(rank, inputs)] if size > 1 else [*enumerate(inputs.chunk(2))]
        return ((torch.cat([self.model(half, branch) for branch, half in halves]) - targets) ** 2).mean()


class Leftover(Gan):
    """With aggregation: the first model has a backward pass only on batches that do not update it."""

    def train_on(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        if not self.context.is_update_batch():
            self.context.backward(loss)
            self.critics.zero_grad()
        self.context.backward((self.critic(batch[0]) ** 2).mean())
        self.context.step_optimizer(self.optimizer)
        self.context.step_optimizer(self.critics)
        return loss


class Random(Plain):
    """Ranks begin with different weights, and have dropout and running averages."""

    def wrap(self) -> None:
        torch.manual_seed(self.context.distributed.rank)
        layers = [torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1)]
        self.model = self.context.wrap_model(torch.nn.Sequential(*layers))
        self.optimizer = self.context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.05))


class Uneven(Plain):
    """The first rank validates on two batches, the second on one."""

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.Subset(self.make_loader().dataset, range(12)), batch_size=4)


class FullDataset(Plain):
    evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader: Any) -> Any:
        return {"validation_loss": torch.stack([self.loss(batch) for batch in data_loader]).mean()}


class Large(Plain):
    """Notes how much memory is taken before its checkpoint, and the most that is taken from then on."""

    def wrap(self) -> None:
        layers = [torch.nn.Linear(4, 1024), *(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16))]
        self.model = self.context.wrap_model(torch.nn.Sequential(*layers, torch.nn.Linear(1024, 1)))
        self.optimizer = self.context.wrap_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.before = self.peak = 0

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return self.train_on(batch)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"watch": Watch(self)}

    def watch(self) -> None:
        while True:
            self.peak = max(self.peak, resident_bytes())
            time.sleep(0.0005)


class Watch(pytorch.PyTorchCallback):
    def __init__(self, trial: Large) -> None:
        self.trial = trial

    def on_validation_end(self, metrics: Any) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self.trial.before = resident_bytes()
        threading.Thread(target=self.trial.watch, daemon=True).start()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
