"""What the ranks of the tests run: trials, trained one after another; each rank writes what it found to files.

One process on all of the data can be compared, by the weights of a model as a whole.

torchrun --nproc-per-node 1 -m tests.distributed.ranks one OUTPUT
torchrun --nproc-per-node 2 -m tests.distributed.ranks two OUTPUT S3_URL OPTIONS
torchrun --nproc-per-node 2 -m tests.distributed.ranks real OUTPUT
torchrun --nproc-per-node 3 -m tests.distributed.ranks three OUTPUT
python -m tests.distributed.ranks lightning OUTPUT
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch.distributed.tensor import DTensor

from det_lightning import core, errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.adapters.strategies import PerModelFSDPStrategy
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.pytorch._weights import collect_weights, load_models, load_state
from tests.conformance.trials import callback
from tests.trials import seed_everything
from tests.versions import SHARDS

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


#: By name: the trial, and how many batches are aggregated.
SCENARIOS: dict[str, tuple[type[Plain], int]] = {
    "plain": (Plain, 1),
    "aggregated": (Plain, 3),
    "gan": (Gan, 1),
    "orders": (Orders, 1),
    "frozen": (Frozen, 1),
    "leftover": (Leftover, 2),
    "clipped": (Clipped, 1),
    "unused": (Unused, 1),
    "random": (Random, 1),  # which one process with all of the data cannot be compared with
}
DDP_SCENARIOS = ("plain", "aggregated", "gan", "orders", "frozen", "leftover", "clipped", "random")
#: Trainings that stop after five batches and resume: the scenario, the strategy before, and the one after.
RESUMES = [
    ("random", "trial_ddp", "trial_ddp"),
    ("aggregated", "trial_ddp", "trial_ddp"),
    ("aggregated", "trial_ddp", "trial_fsdp"),
    ("aggregated", "trial_fsdp", "trial_ddp"),
    ("aggregated", "trial_fsdp", "trial_fsdp"),
    ("random", "trial_fsdp", "trial_fsdp"),
]
#: What ``pl.Trainer`` trains.
LENGTH: dict[str, Any] = {"max_length": pytorch.Batch(BATCHES), "reporting_period": pytorch.Batch(4)}


@contextlib.contextmanager
def context_of(strategy: Any, frequency: int = 1, **optimizations: Any) -> Iterator[pytorch.PyTorchTrialContext]:
    seed_everything()
    with pytorch.init(
        hparams={"global_batch_size": GLOBAL_BATCH},
        exp_conf={"name": "ranks", "optimizations": optimizations},
        distributed=core.DistributedContext.from_torch_distributed() if dist.is_initialized() else None,
        aggregation_frequency=frequency,
        enable_tensorboard_logging=False,
        strategy=strategy,
    ) as context:
        yield context


def train(
    kind: type[Plain],
    storage: Any,
    strategy: Any,
    batches: int = BATCHES,
    frequency: int = 1,
    compresses: bool = False,
    **fit: Any,
) -> Any:
    with context_of(strategy, frequency, gradient_compression=compresses) as context:
        trial = kind(context)
        fit = {"checkpoint_policy": "none", "reporting_period": pytorch.Batch(4), **fit}
        pytorch.Trainer(trial, context, enable_progress_bar=False).fit(
            max_length=pytorch.Batch(batches),
            checkpoint_storage=storage,
            validation_period=kind.validation_period,
            **fit,
        )
        return trial


def save(trial: Plain, output: Path, name: str, **more: Any) -> None:
    buffers = [buffer for model in trial.context.models for buffer in model.buffers()]
    content = {"updates": trial.updates, "first_batch": trial.first_batch, "buffers": buffers, **more}
    torch.save(content, output / f"{name}-{trial.context.distributed.rank}.pt")


def train_scenario(output: Path, name: str, strategy: str) -> None:
    kind, frequency = SCENARIOS[name]
    trial = train(kind, output / f"{name}-{strategy}-storage", strategy, frequency=frequency)
    save(trial, output, f"{name}-{strategy}")


def only_checkpoint(storage: Path) -> Path:
    dist.barrier()
    (metadata,) = storage.glob("*/metadata.json")
    return metadata.parent


def train_half(output: Path, name: str, strategy: str) -> None:
    kind, frequency = SCENARIOS[name]
    train(kind, output / f"{name}-{strategy}-five", strategy, batches=5, frequency=frequency)


def resume(output: Path, name: str, before: str, after: str) -> None:
    """Train a scenario to its end, from the only checkpoint of a training that stopped."""
    kind, frequency = SCENARIOS[name]
    half = only_checkpoint(output / f"{name}-{before}-five")
    storage = output / f"{name}-{before}-{after}-storage"
    trial = train(kind, storage, after, frequency=frequency, latest_checkpoint=half)
    save(trial, output, f"{name}-{before}-{after}")


def one(output: Path) -> None:
    """Train on one rank what two can be compared with."""
    for name, (kind, frequency) in SCENARIOS.items():
        if kind is not Random:
            strategy = "trial_fsdp" if SHARDS else "trial_ddp"
            save(train(kind, output / f"{name}-one-storage", strategy, frequency=frequency), output, f"{name}-one")


def two(output: Path, url: str, options: str) -> None:
    for name in DDP_SCENARIOS:
        train_scenario(output, name, "trial_ddp")
    resumes = [resume for resume in RESUMES if SHARDS or "trial_fsdp" not in resume]
    for name, before in sorted({(name, before) for name, before, _ in resumes}):
        train_half(output, name, before)
    for arguments in resumes:
        resume(output, *arguments)
    if SHARDS:
        train_sharded(output)
        write_shards(output)
        write_shards_into_a_bucket(output, url, options)


def train_sharded(output: Path) -> None:
    for name in SCENARIOS:
        train_scenario(output, name, "trial_fsdp")
    units = PerModelFSDPStrategy(policy=[torch.nn.Linear])
    save(train(Gan, output / "units-storage", units), output, "units")
    background = DeterminedCheckpoint(output / "large-storage", policy="none", async_write=True)
    large = train(Large, None, "trial_fsdp", batches=2, checkpoints=background)
    checks = {"before": large.before, "peak": large.peak, "refused": refused(), "scale": scale_after_overflow()}
    torch.save(checks, output / f"checks-{dist.get_rank()}.pt")


def refused() -> list[str]:
    """Return why an optimizer over parameters before sharding is refused, and models that share parameters."""
    found = []
    with context_of("trial_fsdp") as context:
        model, tied = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        tied.weight = model.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        context.wrap_model(model)
        for wrap in (lambda: context.wrap_optimizer(optimizer), lambda: context.wrap_model(tied)):
            try:
                wrap()
            except errors.InvalidExperimentException as e:
                found.append(str(e))
    return found


def scale_after_overflow() -> float:
    """Return the scale after a step whose gradient is infinite in the shard of the second rank only."""
    with context_of("trial_fsdp") as context:
        model = context.wrap_model(torch.nn.Linear(1, 2, bias=False))
        optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        context.backend.gradients.begin_batch(True)
        context.backward(scaler.scale((model(torch.ones(1, 1)) * torch.tensor([1.0, float("inf")])).sum()))
        context.step_optimizer(optimizer, scaler=scaler)
        scaler.update()
        assert whole(next(model.parameters())).isfinite().all()
        return scaler.get_scale()


def in_shards() -> PerModelFSDPStrategy:
    return PerModelFSDPStrategy(sharded_checkpoints=True)


def write_shards(output: Path) -> None:
    """Write a checkpoint of each scenario in shards, and resume from it."""
    scenarios: list[tuple[str, type[Plain], int, list[str]]] = [
        ("random", Looking, 1, ["trial_fsdp"]),
        ("aggregated", Plain, 3, ["trial_fsdp", "trial_ddp"]),
        ("gan", Gan, 1, []),
    ]
    for name, kind, frequency, strategies in scenarios:
        written = train(kind, output / f"{name}-sharded", in_shards(), batches=5, frequency=frequency)
        if isinstance(written, Looking):
            torch.save(written.seen, output / f"seen-{dist.get_rank()}.pt")
        checkpoint = only_checkpoint(output / f"{name}-sharded")
        for strategy in strategies:
            storage = output / f"{name}-shards-{strategy}-storage"
            trial = train(kind, storage, strategy, frequency=frequency, latest_checkpoint=checkpoint)
            save(trial, output, f"{name}-shards-{strategy}")
    train_half(output, "gan", "trial_fsdp")
    large = train(Large, output / "large-storage", in_shards(), batches=2)
    torch.save({"before": large.before, "peak": large.peak}, output / f"memory-{dist.get_rank()}.pt")
    (output / f"failure-{dist.get_rank()}.txt").write_text(failure(output / "failing-storage"))


def write_shards_into_a_bucket(output: Path, url: str, options: str) -> None:
    bucket: Any = CheckpointStorage(url, options=json.loads(options))
    train(Random, bucket, in_shards(), batches=5)
    save(train(Random, bucket, in_shards(), latest_checkpoint="last"), output, "remote")


def failure(storage: Path) -> str:
    """Return the error of a run whose second rank cannot write more than 15 kB into a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, resource.RLIM_INFINITY))
    try:
        train(Plain, storage, in_shards(), batches=5)
    except errors.CheckpointError as e:
        return str(e)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "nothing was raised"


def gather_loaded(output: Path, name: str, kind: Any, state: dict[str, Any]) -> None:
    """Load a state into shards; keep what is gathered from there."""
    with context_of("trial_fsdp") as context:
        kind(context)
        load_state(context, {}, state, name)
        gathered = collect_weights(context)
        if dist.get_rank() == 0:
            torch.save(gathered, output / f"{name}.pt")
        else:
            assert not any(gathered["models_state_dict"]) and not any(gathered["optimizers_state_dict"])


def three(output: Path) -> None:
    """Load into three shards what one rank has written, what two have, and what does not fit."""
    for name in ("one-storage", "sharded"):
        state = load_checkpoint(only_checkpoint(output / f"gan-{name}"), in_parts=name == "sharded").state
        gather_loaded(output, f"reloaded-{name}", Gan, {**state, "lr_schedulers_state_dict": []})
    with context_of("trial_fsdp") as context:
        wrong = {"weight": torch.ones(2, 2), "bias": torch.ones(4)}
        critic = Gan(context).critic.state_dict()
        try:
            load_models(context, {"models_state_dict": [wrong, critic]}, "wrong")
        except errors.InvalidCheckpointException as e:
            (output / f"wrong-{dist.get_rank()}.txt").write_text(str(e))


def real(output: Path) -> None:
    """Write what the real determined will read, whole and in shards; load into shards what it has written."""
    from tests.conformance.trials import Basic, of_side

    train_scenario(output, "plain", "trial_fsdp")
    train(Plain, output / "aggregated-sharded", in_shards(), batches=5, frequency=3)
    state = torch.load(output / "real.pth", weights_only=False)
    gather_loaded(output, "reloaded-real", of_side(pytorch, Basic), state)


def fit(
    kind: type[Plain], strategy: Any, ckpt_path: str | None = None, settings: dict[str, Any] = LENGTH, **options: Any
) -> Any:
    """Train with ``pl.Trainer`` on two ranks; return the module."""
    module = TrialModule(kind, {"global_batch_size": GLOBAL_BATCH}, **settings)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", **{**quiet, **options})
    seed_everything()
    trainer.fit(module, ckpt_path=ckpt_path)
    return module


def lightning(output: Path) -> None:
    strategies = {
        "lightning": "trial_ddp",
        "lightning-ddp": "ddp",
        "lightning-options": DDPStrategy(gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=1),
    }
    for name, strategy in strategies.items():
        module = fit(Plain, strategy)
        model = module.models[0]
        assert model.static_graph == model.gradient_as_bucket_view == (name == "lightning-options")
        save(module.trial, output, name)
    fit_unevenly(output)
    if SHARDS:
        fit_sharded(output)


class Looks(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)


def fit_unevenly(output: Path) -> None:
    """Train three epochs, with and without a callback that looks at each batch; with and without a limit."""
    runs: Any = [("each-batch", [Looks()], 1.0), ("many-batches", [], 1.0), ("limited", [Looks()], 0.7)]
    for name, callbacks, limit in runs:
        options: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": limit, "callbacks": [*callbacks]}
        trial = fit(Uneven, "trial_ddp", settings={}, **options).trial
        save(trial, output, name, epochs=trial.epochs, seen=[callback.seen for callback in callbacks])


def fit_sharded(output: Path) -> None:
    """Stop after six batches; go on from Lightning's file, and replicated from Determined's format."""
    file = ModelCheckpoint(output / "half", save_last=True, every_n_train_steps=1, save_top_k=0)
    directory = DeterminedCheckpoint(output / "half-storage", policy="none")
    writers: dict[str, Any] = {"callbacks": [file, directory], "enable_checkpointing": True}
    module = fit(Plain, "trial_fsdp", settings={"max_length": pytorch.Batch(6)}, **writers)
    module.trainer.validate(module, verbose=False)
    save(fit(Plain, "trial_fsdp", file.last_model_path).trial, output, "lightning-from-file")
    save(fit(Plain, "trial_ddp", directory.last_checkpoint_path).trial, output, "lightning-from-directory")


if __name__ == "__main__":
    command, folder = sys.argv[1], Path(sys.argv[2])
    commands: dict[str, Any] = {f.__name__: f for f in (one, two, three, real, lightning)}
    if command != "lightning":
        dist.init_process_group("gloo")
    commands[command](folder, *sys.argv[3:])
    if command != "lightning":
        dist.barrier()
        dist.destroy_process_group()
