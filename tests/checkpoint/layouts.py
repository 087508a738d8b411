"""Checkpoints as older releases of Determined laid them out, built by hand from one of today."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

#: A trial as users wrote it for Determined, in the copy of the code that every checkpoint has.
CODE = '''
import numpy as np
import torch
from determined.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext

import helper_module


class OldTrial(PyTorchTrial):
    """One model, one optimizer and one scheduler, as the oldest layout needs."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.width = helper_module.WIDTH * context.get_hparam("scale")
        self.model = context.wrap_model(torch.nn.Linear(4, self.width))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.scheduler = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5), LRScheduler.StepMode.STEP_EVERY_BATCH
        )

    def make_loader(self, **kwargs):
        data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 96).reshape(24, 4))
        return DataLoader(data, batch_size=4, **kwargs)

    def build_training_data_loader(self):
        return self.make_loader(shuffle=True)

    def build_validation_data_loader(self):
        return self.make_loader()

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = (self.model(batch[0]) ** 2).mean() * (1 + 0.01 * np.random.rand())
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"loss": (self.model(batch[0]) ** 2).mean()}
'''

#: The same trial in the interface before 0.12.13.
FUNCTIONAL_CODE = """
import torch
from determined.pytorch import DataLoader, LRScheduler, PyTorchTrial


class OldTrial(PyTorchTrial):
    def __init__(self, context):
        self.context = context

    def build_model(self):
        return torch.nn.Linear(4, 2 * self.context.get_hparam("scale"))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def create_lr_scheduler(self, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return LRScheduler(scheduler, step_mode=LRScheduler.StepMode.STEP_EVERY_BATCH)

    def build_training_data_loader(self):
        return DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch, model, epoch_idx, batch_idx):
        return {"loss": (model(batch[0]) ** 2).mean()}

    def evaluate_batch(self, batch, model):
        return {"loss": (model(batch[0]) ** 2).mean()}
"""

HPARAMS = {"global_batch_size": 4, "scale": 2}
CONFIG = {"entrypoint": "model_def:OldTrial", "hyperparameters": HPARAMS, "description": "from long ago"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one group of releases wrote a checkpoint."""

    name: str
    state_file: str = "state_dict.pth"
    single_keys: bool = False  # for one model, optimizer and scheduler, in place of lists
    progress_file: str | None = "trial_state.pkl"
    count: str = "batches_trained"  # the name of the number of batches in the progress
    described_by: str | None = "load_data.json"  # names the trial's class and hyperparameters
    zipped: bool = True  # torch's file format since 1.6
    is_trainer: bool = False  # the script called ``Trainer`` itself
    has_metadata: bool = True  # which the platform's download added before 0.18

    def __str__(self) -> str:
        return self.name


_WORKLOADS = "workload_sequencer.pkl"
LAYOUTS = [
    Layout("pedl", "pedl/state_dict.pth", True, None, described_by="metadata.json", zipped=False),
    Layout("0.12 single file", "checkpoint.pt", True, None, described_by="metadata.json", zipped=False),
    Layout("0.12", "determined/state_dict.pth", True, None, described_by="metadata.json", zipped=False),
    Layout("0.13", progress_file=None, described_by="metadata.json", zipped=False),
    Layout("0.17.6", "state_dict.pth", False, _WORKLOADS, "latest_batch", "metadata.json"),
    Layout("0.17.6 in the bucket", "state_dict.pth", False, _WORKLOADS, "latest_batch", None, has_metadata=False),
    Layout("0.17.8", "state_dict.pth", False, _WORKLOADS, "latest_batch"),
    Layout("0.17.8 in the bucket", "state_dict.pth", False, _WORKLOADS, "latest_batch", has_metadata=False),
    Layout("0.18", "state_dict.pth", False, _WORKLOADS, "steps_completed"),
    Layout("0.21"),
    Layout("0.38, the script calls Trainer", is_trainer=True),
]


def make_state(batches: int = 5) -> dict[str, Any]:
    """Train the trial of the checkpoints by hand; return what Determined saves of it."""
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for _ in range(batches):
        optimizer.zero_grad()
        (model(torch.randn(4, 4, generator=generator)) ** 2).mean().backward()
        optimizer.step()
        scheduler.step()
    parts: dict[str, Any] = {"models": model, "optimizers": optimizer, "lr_schedulers": scheduler}
    return {**{f"{name}_state_dict": [part.state_dict()] for name, part in parts.items()}, "callbacks": {}}


def write(directory: Path, layout: Layout, batches: int = 5, code: str = CODE) -> Path:
    """Write a checkpoint after a number of batches, in a layout; return ``directory``."""
    state = make_state(batches)
    if layout.single_keys:
        (model,), (optimizer,), (scheduler,), callbacks = state.values()
        old = {"model_state_dict": model, "optimizer_state_dict": optimizer, "lr_scheduler": scheduler}
        state = {**old, "callbacks": callbacks}
    state_file = directory / layout.state_file
    state_file.parent.mkdir(parents=True)
    torch.save(state, state_file, _use_new_zipfile_serialization=layout.zipped)
    progress = {"trial_id": 17, "last_ckpt": batches, "step_id": 1, "last_val": 0, layout.count: batches}
    if layout.progress_file == "trial_state.pkl":
        progress["epochs_trained"] = batches // 6
    if layout.progress_file is not None:
        (directory / layout.progress_file).write_bytes(pickle.dumps(progress, protocol=3))
    settings = {"experiment_config": CONFIG, "hparams": HPARAMS}
    metadata: dict[str, Any] = {"steps_completed": batches, "framework": "torch-1.10", "format": "pickle"}
    if layout.described_by == "load_data.json":
        load_data = {"trial_type": "PyTorchTrial", "trial_cls_spec": "model_def:OldTrial", **settings}
        load_data |= {"is_trainer": True} if layout.is_trainer else {}
        (directory / "load_data.json").write_text(json.dumps(load_data))
    elif layout.single_keys:
        # The oldest named torch's version in a key of its own.
        metadata = {"torch_version": "1.4.0", "tensorflow_version": None, **settings}
    else:
        metadata.update(settings)
    if layout.has_metadata:
        (directory / "metadata.json").write_text(json.dumps(metadata))
    (directory / "code").mkdir()
    (directory / "code/model_def.py").write_text(code)
    (directory / "code/helper_module.py").write_text("WIDTH = 2\n")
    return directory


def import_trial(directory: Path) -> type:
    """Import the trial from a checkpoint's code, as a user does who has it in a repository, on det_lightning."""
    shutil.copytree(directory / "code", directory.parent / "repository", dirs_exist_ok=True)
    source = (directory.parent / "repository/model_def.py").read_text().replace("determined.", "det_lightning.")
    source = source.replace("import helper_module", "class helper_module:\n    WIDTH = 2")
    namespace: dict[str, Any] = {"__name__": "ported_model_def"}
    exec(source, namespace)
    trial_class: type = namespace["OldTrial"]
    return trial_class
