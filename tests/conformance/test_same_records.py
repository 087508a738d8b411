"""Recorded on the real determined, in a process of its own, a trial trains as it does here, to the bit."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from det_lightning import import_from_path
from det_lightning.importing import load_class
from det_lightning.testing import recorder
from det_lightning.testing.records.comparison import first_difference
from det_lightning.testing.records.difference import BIT_EQUAL
from det_lightning.testing.records.record import RecordError, RunSettings, TrainingRecord, read_record
from det_lightning.testing.training.reference import record_determined, record_ours

SETTINGS = RunSettings(hparams={"lr": 0.05, "global_batch_size": 4}, batches=8, validation_period=3, reporting_period=2)

TRIAL = """
import random
import numpy as np
import torch
from det_lightning import pytorch

class Stopper(pytorch.PyTorchCallback):
    validations = 0

    def on_validation_end(self, metrics):
        self.validations += 1

    def state_dict(self):
        return {"validations": self.validations}

class Noisy(pytorch.PyTorchTrial):
    def __init__(self, context, width=5):
        self.context = context
        self.model = context.wrap_model(torch.nn.Sequential(
            torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), context.get_hparam("lr")))
        self.scheduler = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, 3), pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.mean = context.wrap_reducer(np.mean, name="mean_of_first")

    def data(self, samples):
        inputs = torch.randn(samples, 3)
        return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def build_training_data_loader(self):
        return pytorch.DataLoader(self.data(22), batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.data(10), batch_size=4)

    def build_callbacks(self):
        return {"stopper": Stopper()}

    def loss(self, batch):
        self.mean.update(float(batch[0][0, 0]))
        return ((self.model(batch[0]) - batch[1]) ** 2).mean() * (1 + random.random() + float(np.random.rand()))

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "kind": "training"}

    def evaluate_batch(self, batch):
        return {"validation_loss": self.loss(batch)}

class Failing(Noisy):
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 2:
            raise ArithmeticError("not today")
        return super().train_batch(batch, epoch_idx, batch_idx)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "model_def.py").write_text(TRIAL)
    with import_from_path(tmp_path):
        yield tmp_path


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("Noisy", {"aggregation_frequency": 2, "arguments": {"width": 3}, "config": {"searcher": {"metric": "x"}}}),
        ("Failing", {}),
    ],
)
def test_a_ported_trial_trains_as_on_determined(name: str, changed: dict[str, object], directory: Path) -> None:
    settings = dataclasses.replace(SETTINGS, **changed)  # type: ignore[arg-type]
    reference = record_determined(f"model_def:{name}", settings, directory=directory)
    assert_same_record(reference)
    assert reference.batches == (2 if name == "Failing" else 8)
    assert (reference.error is not None) == (name == "Failing")


def assert_same_record(reference: TrainingRecord) -> None:
    threads = int(reference.environment["threads"])
    ours = record_ours(load_class(reference.trial.replace(".py", "")), reference.settings, threads=threads)
    assert (reference.environment["side"], ours.environment["side"]) == ("determined", "det_lightning")
    assert str(first_difference(reference, ours)) == "None"
    assert first_difference(reference, ours, BIT_EQUAL) is None


def test_a_copy_of_the_recorder_is_enough(directory: Path) -> None:
    shutil.copy(recorder.__file__, directory)
    (directory / "const.yaml").write_text("hyperparameters: {lr: {type: const, val: 5e-2}, global_batch_size: 4}\n")
    options = ["--config", "const.yaml", "--batches", "3", "--arguments", '{"width": 2}', "--output", "ref.json"]
    subprocess.run([sys.executable, "recorder.py", "model_def.py:Noisy", *options], cwd=directory, check=True)
    record = read_record(directory / "ref.json", "model_def:Noisy")
    assert (record.batches, record.error, record.settings.hparams["lr"]) == (3, None, 0.05)
    assert_same_record(record)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("model_def:Nosy", "has no class Nosy; the trials in it: Noisy, Failing"),
        ("nowhere:Noisy", "Module nowhere in .* cannot be imported:(.|\n)*No module named 'nowhere'"),
        ("broken:Noisy", "broken.py(.|\n)*ZeroDivisionError"),
        ("lightning_too:Noisy", "determined has nothing like det_lightning.adapters"),
        ("model_def", "The trial must be module:Class"),
    ],
)
def test_what_can_not_be_recorded_is_explained(spec: str, message: str, directory: Path) -> None:
    (directory / "broken.py").write_text("1 / 0\n")
    (directory / "lightning_too.py").write_text("from det_lightning.adapters import TrialModule\n")
    with pytest.raises(RecordError, match=message):
        record_determined(spec, SETTINGS, directory=directory)
