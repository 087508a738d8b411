"""Whole trials: ported without a manual edit, they train."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import det_lightning as det
from det_lightning.porting import port_file

TRIALS = Path(__file__).parent / "trials"
HPARAMS: dict[str, dict[str, Any]] = {
    "adversaries": {"noise": 2, "lr": 0.01},
    "detections": {},
    "images": {"filters": 2, "lr": 0.1},
    "sentences": {"lr": 0.1, "clip": 0.1, "data": {"vocabulary": 20}},
    "words": {"size": 4, "lr": 0.01, "clip": 0.5},
}


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ported(name: str, directory: Path) -> Path:
    file = directory / f"ported_{name}.py"
    port = port_file(TRIALS / f"{name}.py")
    assert port.findings == []
    file.write_text(port.after)
    return file


# The others are trained by tests/porting/test_side_by_side.py.
@pytest.mark.parametrize("name", ["detections", "images"])
def test_a_ported_trial_trains(name: str, tmp_path: Path) -> None:
    module = load(ported(name, tmp_path))
    hparams = {**HPARAMS[name], "global_batch_size": 4}
    with det.pytorch.init(
        hparams=hparams, exp_conf={"data": hparams.get("data")}, enable_tensorboard_logging=False
    ) as context:
        trial = getattr(module, f"{name.capitalize()}Trial")(context)
        trainer = det.pytorch.Trainer(trial, context)
        trainer.fit(max_length=det.pytorch.Batch(2), checkpoint_storage=tmp_path / "checkpoints")
    if name == "detections":
        assert trial.reporting.seen[:3] == ["epoch", "start", ["error"]]


def test_a_ported_script_runs(tmp_path: Path) -> None:
    module = load(ported("digits", tmp_path))
    trial = module.run({"hidden": 4, "lr": 0.1}, local=True)
    assert trial.context.current_train_batch() == 0


def test_other_lines_stay() -> None:
    port = port_file(TRIALS / "detections.py")
    changes = [line for line in difflib.ndiff(port.before.splitlines(), port.after.splitlines()) if line[0] in "+-"]
    assert len([line for line in changes if line[0] == "-"]) == 11
    assert [line[2:].strip() for line in changes if line[0] == "+"] == [
        "from det_lightning.pytorch import DataLoader, PyTorchTrial",
        "from det_lightning.pytorch import PyTorchCallback",
        "from det_lightning.pytorch import LRScheduler  # noqa: F401",
        "from det_lightning.tensorboard.metric_writers.pytorch import TorchWriter",
        "def on_training_epoch_start(self, epoch_idx: int):",
        "def on_validation_start(self):",
        "def on_validation_end(self, metrics):",
        "def on_checkpoint_write_end(self, checkpoint_dir):",
        'self.error = self.context.wrap_reducer(mean_of, name="error", for_training=False)',
    ]
