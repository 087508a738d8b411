"""Whole trials: ported without a manual edit, they train."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import det_lightning as det
from det_lightning.porting import port_file

TRIALS = Path(__file__).parent / "trials"
HPARAMS = {
    "adversaries": {"noise": 2, "lr": 0.01},
    "detections": {},
    "images": {"filters": 2, "lr": 0.1},
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


@pytest.mark.parametrize("name", HPARAMS)
def test_a_ported_trial_trains(name: str, tmp_path: Path) -> None:
    module = load(ported(name, tmp_path))
    hparams = {**HPARAMS[name], "global_batch_size": 4}
    with det.pytorch.init(hparams=hparams, enable_tensorboard_logging=False) as context:
        trial = getattr(module, f"{name.capitalize()}Trial")(context)
        trainer = det.pytorch.Trainer(trial, context)
        trainer.fit(max_length=det.pytorch.Batch(2), checkpoint_storage=tmp_path / "checkpoints")
    if name == "detections":
        assert trial.reporting.seen[:3] == ["epoch", "start", ["error"]]


def test_a_port_is_formatted_as_the_original(tmp_path: Path) -> None:
    """No line changes that has nothing to do with it."""
    before, after = (TRIALS / "detections.py").read_text(), ported("detections", tmp_path).read_text()
    (tmp_path / "before.py").write_text(before)
    done = subprocess.run(
        ["git", "diff", "--no-index", "--numstat", tmp_path / "before.py", tmp_path / "ported_detections.py"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[:2] == ["9", "11"]
    assert "experimental" not in after
