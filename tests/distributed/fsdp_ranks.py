"""What the ranks of tests/distributed/test_fsdp.py run; each rank writes what it found to a file.

torchrun --nproc-per-node 2 -m tests.distributed.fsdp_ranks two|load|real OUTPUT
torchrun --nproc-per-node 1 -m tests.distributed.fsdp_ranks one OUTPUT
python -m tests.distributed.fsdp_ranks lightning OUTPUT
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from det_lightning import core, errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.adapters.strategies import PerModelFSDPStrategy
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import load_checkpoint
from det_lightning.pytorch._weights import collect_weights, load_models, load_state
from tests.distributed import ranks
from tests.distributed.fsdp_trials import (
    Clipped,
    Frozen,
    FullDataset,
    Gan,
    Large,
    Leftover,
    Orders,
    Plain,
    Random,
    Uneven,
    Unused,
    whole,
)
from tests.trials import seed_everything

BATCHES = 12

SCENARIOS: dict[str, tuple[type[Plain], int]] = {
    "plain": (Plain, 1),
    "aggregated": (Plain, 3),
    "gan": (Gan, 1),
    "orders": (Orders, 1),
    "frozen": (Frozen, 1),
    "clipped": (Clipped, 1),
    "unused": (Unused, 1),
    "leftover": (Leftover, 2),
}
#: What one process with all of the data cannot be compared with.
OF_TWO: dict[str, tuple[type[Plain], int]] = {"random": (Random, 1), "uneven": (Uneven, 1), "full": (FullDataset, 1)}


@contextlib.contextmanager
def context_of(strategy: Any, frequency: int = 1) -> Iterator[pytorch.PyTorchTrialContext]:
    seed_everything()
    with pytorch.init(
        hparams={"global_batch_size": ranks.GLOBAL_BATCH},
        exp_conf={"name": "ranks"},
        distributed=core.DistributedContext.from_torch_distributed(),
        aggregation_frequency=frequency,
        enable_tensorboard_logging=False,
        strategy=strategy,
    ) as context:
        yield context


def train(
    kind: type[Plain], storage: Path | None, strategy: Any, batches: int = BATCHES, frequency: int = 1, **fit: Any
) -> Any:
    with context_of(strategy, frequency) as context:
        trial = kind(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        fit = {"checkpoint_policy": "none", "reporting_period": pytorch.Batch(4), **fit}
        trainer.fit(max_length=pytorch.Batch(batches), checkpoint_storage=storage, **fit)
        return trial


def save(trial: Plain, output: Path, name: str) -> None:
    buffers = [buffer for model in trial.context.models for buffer in model.buffers()]
    torch.save({"updates": trial.updates, "buffers": buffers}, output / f"{name}-{trial.context.distributed.rank}.pt")


def two(output: Path) -> None:
    for strategy in ("trial_fsdp", "trial_ddp"):
        for name, (kind, frequency) in {**SCENARIOS, **OF_TWO}.items():
            if strategy == "trial_ddp" and name == "unused":
                continue
            storage = output / f"{name}-{strategy}-storage"
            save(train(kind, storage, strategy, frequency=frequency), output, f"{name}-{strategy}")
    units = PerModelFSDPStrategy(policy=[torch.nn.Linear])
    save(train(Gan, output / "units-storage", units), output, "units")
    resumes = {
        "fsdp-fsdp": ("trial_fsdp", "trial_fsdp", Random, 1),
        "fsdp-ddp": ("trial_fsdp", "trial_ddp", Plain, 1),
        "ddp-fsdp": ("trial_ddp", "trial_fsdp", Plain, 1),
        "aggregated-fsdp-fsdp": ("trial_fsdp", "trial_fsdp", Plain, 3),
        "aggregated-fsdp-ddp": ("trial_fsdp", "trial_ddp", Plain, 3),
        "aggregated-ddp-fsdp": ("trial_ddp", "trial_fsdp", Plain, 3),
    }
    for name, (before, after, kind, frequency) in resumes.items():
        storage = output / f"{name}-storage"
        train(kind, storage, before, batches=5, frequency=frequency)
        save(train(kind, storage, after, frequency=frequency, latest_checkpoint="last"), output, name)
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


def one(output: Path) -> None:
    for name, (kind, frequency) in SCENARIOS.items():
        save(train(kind, output / f"{name}-one-storage", "trial_fsdp", frequency=frequency), output, f"{name}-one")


def load(output: Path) -> None:
    """Load into shards what one process has written; keep what is gathered from there."""
    (path,) = (output / "gan-one-storage").glob("*/metadata.json")
    state = load_checkpoint(path.parent).state
    with context_of("trial_fsdp") as context:
        trial = Gan(context)
        load_state(context, {}, {**state, "lr_schedulers_state_dict": []}, str(path))
        gathered = collect_weights(context)
        if dist.get_rank() == 0:
            torch.save(gathered, output / "reloaded.pt")
        else:
            assert not any(gathered["models_state_dict"]) and not any(gathered["optimizers_state_dict"])
        wrong = {"models_state_dict": [{"weight": torch.ones(2, 2), "bias": torch.ones(4)}, trial.critic.state_dict()]}
        try:
            load_models(context, wrong, "wrong")
        except errors.InvalidCheckpointException as e:
            (output / f"wrong-{dist.get_rank()}.txt").write_text(str(e))


def real(output: Path) -> None:
    """Write what the real determined will read; load into shards what it has written, and keep what is gathered."""
    from tests.conformance.trials import Basic, of_side

    save(train(Plain, output / "plain-trial_fsdp-storage", "trial_fsdp"), output, "plain-trial_fsdp")
    state = torch.load(output / "real.pth", weights_only=False)
    with context_of("trial_fsdp") as context:
        of_side(pytorch, Basic)(context)
        load_state(context, {}, state, "real")
        gathered = collect_weights(context)
        if dist.get_rank() == 0:
            torch.save(gathered, output / "reloaded-real.pt")


def lightning(output: Path) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    from det_lightning.callbacks import DeterminedCheckpoint

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    def fit(name: str, batches: int, strategy: str = "trial_fsdp", ckpt_path: str | None = None) -> list[Any]:
        module = TrialModule(Plain, {"global_batch_size": ranks.GLOBAL_BATCH}, max_length=pytorch.Batch(batches))
        writers = [
            ModelCheckpoint(output / name, save_last=True, every_n_train_steps=1, save_top_k=0),
            DeterminedCheckpoint(output / f"{name}-storage", policy="none"),
        ]
        trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", callbacks=writers, **quiet)
        seed_everything()
        trainer.fit(module, ckpt_path=ckpt_path)
        trainer.validate(module, verbose=False)
        assert isinstance(module.trial, Plain)
        save(module.trial, output, name)
        return writers

    fit("lightning", BATCHES)
    file, directory = fit("lightning-half", 6)
    fit("lightning-from-file", BATCHES, ckpt_path=file.last_model_path)
    fit("lightning-from-directory", BATCHES, "trial_ddp", ckpt_path=directory.last_checkpoint_path)


if __name__ == "__main__":
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command != "lightning":
        dist.init_process_group("gloo")
    {"two": two, "one": one, "load": load, "real": real, "lightning": lightning}[command](folder)
    if command != "lightning":
        dist.barrier()
        dist.destroy_process_group()
