"""Trials of several processes, whose weights are compared as a whole."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from det_lightning import pytorch
from tests.conformance.trials import callback

BATCHES, GLOBAL_BATCH = 12, 8


def whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached.clone()


class Plain(pytorch.PyTorchTrial):
    """A deterministic trial, so that one process on all of the data can be compared."""

    validation_period: pytorch.TrainUnit | None = None

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.updates: list[torch.Tensor] = []
        self.first_batch: int | None = None
        torch.manual_seed(0)
        self.wrap()

    def wrap(self) -> None:
        self.model = self.context.wrap_model(self.make_model())
        self.optimizer = self.context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.05))

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1))

    def make_loader(self, samples: int = 96) -> pytorch.DataLoader:
        # The first half of each global batch goes to the first rank, as the sampler deals out whole batches.
        inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size())

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self.make_loader()

    build_validation_data_loader = build_training_data_loader

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return ((self.model(inputs) - targets) ** 2).mean()

    def train_on(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return loss

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if self.first_batch is None:
            self.first_batch = batch_idx
        loss = self.train_on(batch)
        if self.context.is_update_batch():
            flat = [whole(p).reshape(-1) for model in self.context.models for p in model.parameters()]
            self.updates.append(torch.cat(flat))
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": self.loss(batch)}


class Gan(Plain):
    """Two models; the second is part of both losses, and frozen for one of them."""

    def wrap(self) -> None:
        self.model = self.context.wrap_model(torch.nn.Linear(4, 4))
        self.critic = self.context.wrap_model(torch.nn.Linear(4, 1))
        self.optimizer = self.context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9))
        self.critics = self.context.wrap_optimizer(torch.optim.AdamW(self.critic.parameters(), 0.05))

    def loss(self, batch: Any) -> torch.Tensor:
        return -self.critic(self.model(batch[0])).mean()

    def train_on(self, batch: Any) -> torch.Tensor:
        fake = self.model(batch[0])
        critic_loss = (self.critic(fake.detach()) ** 2).mean() - self.critic(batch[0]).mean()
        self.context.backward(critic_loss)
        self.context.step_optimizer(self.critics)
        self.critic.requires_grad_(False)
        loss = self.loss(batch)
        self.context.backward(loss)
        self.critic.requires_grad_(True)
        self.context.step_optimizer(self.optimizer)
        return loss


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


class Orders(Plain):
    """Two backward passes over one forward pass, after a third over a forward pass of its own."""

    def train_on(self, batch: Any) -> torch.Tensor:
        self.context.backward(self.loss(batch) * 0.5)
        outputs = self.model(batch[0])
        loss = ((outputs - batch[1]) ** 2).mean()
        self.context.backward(loss, retain_graph=True)
        self.context.backward(outputs.abs().mean() * 0.1)
        self.context.step_optimizer(self.optimizer)
        return loss


class Frozen(Plain):
    """A layer that is frozen when it is wrapped, and trained later."""

    def wrap(self) -> None:
        network: Any = self.make_model()
        network[0].requires_grad_(False)
        self.model = self.context.wrap_model(network)
        self.optimizer = self.context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))

    def train_on(self, batch: Any) -> torch.Tensor:
        layers: Any = self.model
        layers[0].requires_grad_(len(self.updates) >= 4)  # of the network, which DDP wraps
        return super().train_on(batch)


class Clipped(Plain):
    """Clips its gradients, and evaluates the whole dataset at once, which the first rank does for all."""

    evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

    def train_on(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5))
        return loss

    def evaluate_full_dataset(self, data_loader: Any) -> Any:
        return {"validation_loss": torch.stack([self.loss(batch) for batch in data_loader]).mean()}


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 3) for _ in range(3)])
        self.out = torch.nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.out(self.layers[branch](inputs))


class Unused(Plain):
    """The first half of each global batch goes through one layer, the second through another; a third is not used."""

    def make_model(self) -> torch.nn.Module:
        return Branches()

    def loss(self, batch: Any) -> torch.Tensor:
        rank, size = self.context.distributed.rank, self.context.distributed.size
        inputs, targets = batch
        halves = [(rank, inputs)] if size > 1 else [*enumerate(inputs.chunk(2))]
        return ((torch.cat([self.model(half, branch) for branch, half in halves]) - targets) ** 2).mean()


class Random(Plain):
    """Ranks begin with other weights, draw dropout, keep running averages; of three validation batches one has two."""

    validation_period = pytorch.Batch(5)

    def make_model(self) -> torch.nn.Module:
        torch.manual_seed(self.context.distributed.rank)
        layers = [torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1)]
        return torch.nn.Sequential(*layers)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.make_loader(samples=12)


class Stops(Plain):
    """Its second rank wants to stop after the third batch; the next boundary is after the fourth."""

    def train_on(self, batch: Any) -> torch.Tensor:
        if len(self.updates) == 2 and self.context.distributed.rank == 1:
            self.context.set_stop_requested(True)
        return super().train_on(batch)


class Uneven(Plain):
    """Of its five batches an epoch the first rank gets three, the second two."""

    def make_loader(self, samples: int = 20) -> pytorch.DataLoader:
        return super().make_loader(samples)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.epochs: list[int] = []
        return {"epochs": callback(pytorch, on_training_epoch_start=lambda epoch_idx: self.epochs.append(epoch_idx))}


class Looking(Random):
    """Notes what a trial's callbacks see of a state that nobody holds as a whole."""

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.seen: list[str] = []

        def see_state(checkpoint: dict[str, Any]) -> None:
            weight = checkpoint["models_state_dict"][0]["0.weight"]
            self.seen.append(f"{weight.device} {[*weight.shape]}")

        def see_files(checkpoint_dir: str) -> None:
            self.seen.append(" ".join(sorted(path.name for path in Path(checkpoint_dir).glob("shards/*"))))

        return {"look": callback(pytorch, on_checkpoint_save_start=see_state, on_checkpoint_write_end=see_files)}


class Large(Plain):
    """Notes how much memory is taken before its checkpoint, and the most that is taken from then on."""

    def make_model(self) -> torch.nn.Module:
        self.before = self.peak = 0
        layers = [torch.nn.Linear(4, 1024), *(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16))]
        return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return self.train_on(batch)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.make_loader(samples=8)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"watch": callback(pytorch, on_validation_end=self.begin_to_watch)}

    def begin_to_watch(self, metrics: Any) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self.before = resident_bytes()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        while True:
            self.peak = max(self.peak, resident_bytes())
            time.sleep(0.0005)


#: Weights of the large model and two states of its optimizer, each a float32 for a weight.
LARGE_STATE_BYTES = 3 * 4 * (16 * 1024**2 + 6 * 1024 + 1)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
