"""What the ranks of test_ddp.py run: scenarios, one after another, each writing its updates to a file.

torchrun --nproc-per-node 2 -m tests.distributed.ranks two OUTPUT
torchrun --nproc-per-node 1 -m tests.distributed.ranks one OUTPUT
python -m tests.distributed.ranks lightning OUTPUT
python -m tests.distributed.ranks uneven OUTPUT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from det_lightning import core, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.adapters.strategies import PerModelDDPStrategy
from tests.trials import seed_everything

BATCHES, GLOBAL_BATCH = 12, 8


class Plain(pytorch.PyTorchTrial):
    """A deterministic trial, so that one process on all of the data can be compared."""

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

    def make_loader(self) -> pytorch.DataLoader:
        # The first half of each global batch goes to the first rank, as the sampler deals out whole batches.
        inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size())

    build_training_data_loader = make_loader
    build_validation_data_loader = make_loader

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
            flat = [p.detach().reshape(-1) for model in self.context.models for p in model.parameters()]
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
        network: Any = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1))
        network[0].requires_grad_(False)
        self.model = self.context.wrap_model(network)
        self.optimizer = self.context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))

    def train_on(self, batch: Any) -> torch.Tensor:
        layers: Any = self.model
        layers[0].requires_grad_(len(self.updates) >= 4)  # of the network, which DDP wraps
        return super().train_on(batch)


class Buffers(Plain):
    """Statistics of a batch norm; of its three validation batches one rank gets two."""

    def wrap(self) -> None:
        network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        self.model = self.context.wrap_model(network)
        self.optimizer = self.context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        size = self.context.get_per_slot_batch_size()
        dataset = torch.utils.data.TensorDataset(torch.ones(3 * size, 4), torch.ones(3 * size, 1))
        return pytorch.DataLoader(dataset, batch_size=size)


class Stops(Plain):
    """Its second rank wants to stop after the third batch; the next boundary is after the fourth."""

    def train_on(self, batch: Any) -> torch.Tensor:
        if len(self.updates) == 2 and self.context.distributed.rank == 1:
            self.context.set_stop_requested(True)
        return super().train_on(batch)


def train(
    kind: Callable[..., Plain], storage: Path, batches: int = BATCHES, frequency: int = 1, **fit: Any
) -> tuple[Plain, Any]:
    seed_everything()
    distributed = core.DistributedContext.from_torch_distributed()
    settings: dict[str, Any] = {"hparams": {"global_batch_size": GLOBAL_BATCH}, "exp_conf": {"name": "ranks"}}
    with pytorch.init(
        distributed=distributed, enable_tensorboard_logging=False, aggregation_frequency=frequency, **settings
    ) as context:
        trial = kind(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        fit = {"checkpoint_policy": "none", "reporting_period": pytorch.Batch(4), **fit}
        trainer.fit(max_length=pytorch.Batch(batches), checkpoint_storage=storage, **fit)
        return trial, context


def save(trial: Plain, output: Path, name: str, rank: int) -> None:
    with torch.no_grad():
        metrics = float(torch.stack([trial.loss(batch) for batch in trial.make_loader()]).mean())
    content = {"updates": trial.updates, "first_batch": trial.first_batch, "metrics": metrics}
    torch.save(content, output / f"{name}-{rank}.pt")


SCENARIOS: dict[str, tuple[type[Plain], int]] = {
    "plain": (Plain, 1),
    "aggregated": (Plain, 3),
    "gan": (Gan, 1),
    "orders": (Orders, 1),
    "frozen": (Frozen, 1),
}


def two(output: Path) -> None:
    rank = dist.get_rank()
    for name, (kind, frequency) in SCENARIOS.items():
        save(train(kind, output / f"{name}-storage", frequency=frequency)[0], output, name, rank)
    save(train(Stops, output / "stopped-storage")[0], output, "stopped", rank)
    buffers, _ = train(Buffers, output / "buffers-storage", validation_period=pytorch.Batch(5))
    save(buffers, output, "buffers", rank)
    for name, frequency in (("resumed", 1), ("resumed-aggregation", 3)):
        storage = output / f"{name}-storage"
        train(Plain, storage, batches=5, frequency=frequency)
        save(train(Plain, storage, frequency=frequency, latest_checkpoint="last")[0], output, name, rank)


def one(output: Path) -> None:
    for name, (kind, frequency) in SCENARIOS.items():
        save(train(kind, output / f"{name}-one-storage", frequency=frequency)[0], output, f"{name}-one", 0)
    train(Plain, output / "moved", batches=1)
    storage = output / "resumed-storage"
    earliest = min(storage.glob("*/metadata.json"), key=lambda path: path.stat().st_mtime_ns).parent
    trial, _ = train(Plain, output / "moved", batches=14, latest_checkpoint=earliest)
    save(trial, output, "continued-by-one", 0)


def count_buckets(counts, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations as text
    """Exchange gradients as by default, and count."""
    counts.append(1)
    group: Any = dist.group.WORLD
    return allreduce_hook(group, bucket)


def lightning(output: Path) -> None:
    counts: list[int] = []
    strategies = {
        "lightning": "trial_ddp",
        "lightning-ddp": "ddp",
        "lightning-options": DDPStrategy(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=1),
        "lightning-hook": PerModelDDPStrategy(ddp_comm_hook=count_buckets, ddp_comm_state=counts),
    }
    for name, strategy in strategies.items():
        train_by_lightning(output, name, strategy)
    assert len(counts) == BATCHES


def train_by_lightning(output: Path, name: str, strategy: Any) -> None:
    module = TrialModule(
        Plain, {"global_batch_size": GLOBAL_BATCH}, max_length=pytorch.Batch(BATCHES), reporting_period=pytorch.Batch(4)
    )
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", enable_model_summary=False, **quiet)
    seed_everything()
    trainer.fit(module)
    assert isinstance(module.trial, Plain)
    model: Any = module.models[0]
    assert model.static_graph == model.gradient_as_bucket_view == (name == "lightning-options")
    save(module.trial, output, name, trainer.global_rank)


class Uneven(Plain):
    """Of its five batches an epoch the first rank gets three, the second two."""

    def make_loader(self) -> pytorch.DataLoader:
        size = self.context.get_per_slot_batch_size()
        inputs = torch.randn(5 * size, 4, generator=torch.Generator().manual_seed(1))
        return pytorch.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=size)

    build_training_data_loader = make_loader
    build_validation_data_loader = make_loader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.epochs = EpochStarts()
        return {"epochs": self.epochs}


class EpochStarts(pytorch.PyTorchCallback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.seen.append(epoch_idx)


def uneven(output: Path) -> None:
    """Train three epochs, with and without a callback that looks at each batch; with and without a limit."""

    class Looks(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch_idx)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for name, callbacks, limit in (
        ("each-batch", [Looks()], 1.0),
        ("many-batches", [], 1.0),
        ("limited", [Looks()], 0.7),
    ):
        module = TrialModule(Uneven, {"global_batch_size": GLOBAL_BATCH})
        trainer = pl.Trainer(
            strategy="trial_ddp",
            devices=2,
            accelerator="cpu",
            max_epochs=3,
            limit_train_batches=limit,
            callbacks=[*callbacks],
            **quiet,
        )
        seed_everything()
        trainer.fit(module)
        assert isinstance(module.trial, Uneven)
        content = {
            "updates": module.trial.updates,
            "epochs": module.trial.epochs.seen,
            "seen": [index for callback in callbacks for index in callback.seen],
        }
        torch.save(content, output / f"{name}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command not in ("lightning", "uneven"):
        dist.init_process_group("gloo")
    {"two": two, "one": one, "lightning": lightning, "uneven": uneven}[command](folder)
    if command not in ("lightning", "uneven"):
        dist.barrier()
        dist.destroy_process_group()
