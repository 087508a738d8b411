"""Interrupt a training in the middle of an epoch, resume it in a new process, and compare with one that went through.

    python benchmarks/resume.py [--systems lightning,accelerate]

The same model, data and optimizer for each system; the way to save and resume is the one that the system documents.
Determined and Accelerate have to be installed for their rows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

EPOCH = 8
LENGTH = 20
STOP_AFTER = 11  # three batches into the second epoch


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def build_data() -> torch.utils.data.TensorDataset:
    inputs = torch.randn(EPOCH * 8, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def train_with_determined_api(det: object, storage: Path, length: int, resume: bool, **more: object) -> nn.Module:
    pytorch = det.pytorch

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: object) -> None:
            self.context = context
            self.model = context.wrap_model(build_model())
            self.optimizer = context.wrap_optimizer(build_optimizer(self.model))

        def build_training_data_loader(self) -> object:
            return pytorch.DataLoader(build_data(), batch_size=8, shuffle=True)

        def build_validation_data_loader(self) -> object:
            return pytorch.DataLoader(build_data(), batch_size=8)

        def train_batch(self, batch: object, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
            loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch: object) -> dict[str, torch.Tensor]:
            return {"validation_loss": nn.functional.mse_loss(self.model(batch[0]), batch[1])}

    torch.manual_seed(1)
    with pytorch.init(hparams={"global_batch_size": 8}) as context:
        trial = Trial(context)
        found = sorted(storage.glob("*/metadata.json"), key=lambda file: file.stat().st_mtime)
        latest = found[-1].parent.name if resume else None
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(length), latest_checkpoint=latest, **more)
    return trial.model


def train_with_det_lightning(folder: Path, length: int, resume: bool) -> nn.Module:
    import det_lightning

    storage = folder / "checkpoints"
    return train_with_determined_api(det_lightning, storage, length, resume, checkpoint_storage=storage)


def train_with_lightning(folder: Path, length: int, resume: bool) -> nn.Module:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self.model)

    pl.seed_everything(1)
    module = Module()
    loader = torch.utils.data.DataLoader(build_data(), batch_size=8, shuffle=True)
    trainer = pl.Trainer(max_steps=length, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module, loader, ckpt_path=folder / "last.ckpt" if resume else None)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.model


def train_with_accelerate(folder: Path, length: int, resume: bool) -> nn.Module:
    import accelerate

    accelerate.utils.set_seed(1)
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    )
    model = build_model()
    loader = torch.utils.data.DataLoader(build_data(), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, build_optimizer(model), loader)
    done = 0
    if resume:
        accelerator.load_state(str(folder / "state"))
        done = STOP_AFTER
    while done < length:
        loader.set_epoch(done // EPOCH)
        skipped = done % EPOCH
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        for inputs, targets in batches:
            if done == length:
                break
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            done += 1
    accelerator.save_state(str(folder / "state"))
    return accelerator.unwrap_model(model)


def train_with_determined(folder: Path, length: int, resume: bool) -> nn.Module:
    import functools
    import os

    import determined.pytorch

    os.environ["XDG_DATA_HOME"] = str(folder)
    # It does not load its own checkpoints with torch 2.6 or later, unless torch is told to unpickle.
    torch.load = functools.partial(torch.load, weights_only=False)
    return train_with_determined_api(determined, folder / "determined", length, resume)


SYSTEMS = {
    "det_lightning": train_with_det_lightning,
    "determined": train_with_determined,
    "lightning": train_with_lightning,
    "accelerate": train_with_accelerate,
}


def trained(system: str, folder: Path, *runs: tuple[int, bool]) -> list[torch.Tensor]:
    """Return the weights after runs in processes of their own, each up to a number of batches."""
    (folder / "work").mkdir()
    for length, resume in runs:
        command = [sys.executable, __file__, "--one", system, str(folder), str(length), str(resume)]
        subprocess.run(command, check=True, cwd=folder / "work", capture_output=True, text=True)
    return list(torch.load(folder / "weights.pt").values())


def largest_difference(system: str) -> float:
    """Return the largest difference of a weight between an interrupted training and one that went through."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole = trained(system, Path(one), (LENGTH, False))
        parts = trained(system, Path(other), (STOP_AFTER, False), (LENGTH, True))
    return max((a - b).abs().max().item() for a, b in zip(whole, parts, strict=True))


def figures(short: bool = False) -> dict[str, float]:
    """Return the largest difference of a weight for each system; a ``short`` run is of det_lightning alone."""
    systems = ("det_lightning",) if short else ("det_lightning", "determined", "lightning")
    return {f"{system}/largest_difference": largest_difference(system) for system in systems}


def main() -> None:
    parser = argparse.ArgumentParser(description="Is a resumed training equal to one that was never interrupted?")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which to run, with commas between them")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        system, folder, length, resume = arguments.one
        model = SYSTEMS[system](Path(folder), int(length), resume == "True")
        torch.save(model.state_dict(), Path(folder) / "weights.pt")
        return
    for system in arguments.systems.split(","):
        difference = largest_difference(system)
        print(f"{system:15} {'bit-equal' if difference == 0 else f'largest difference of a weight {difference:.2g}'}")


if __name__ == "__main__":
    main()
