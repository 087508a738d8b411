"""``--trial-checkpoint``: an old checkpoint loads, and a validation gives the metrics recorded with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.pytorch import Batch, Trainer, init
from det_lightning.testing.checks import CheckFailed, NotCompared
from det_lightning.testing.checks import old_checkpoints as checks
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.training.trainings import TrialRuns
from det_lightning.testing.training.trial_source import ImportedTrial
from tests.testing.changed_trials import CORRECT

HPARAMS = {"lr": 0.02, "global_batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    (folder / "model_def.py").write_text(CORRECT)
    return folder


@pytest.fixture(scope="module")
def old(folder: Path) -> Path:
    """A checkpoint that was written with the metric of its validation."""
    storage = folder / "checkpoints"
    checkpoints = DeterminedCheckpoint(storage, metric="validation_loss", code_dir=folder)
    with (
        ImportedTrial("model_def:MyTrial", folder).import_class() as trial_class,
        init(hparams=HPARAMS, enable_tensorboard_logging=False) as context,
    ):
        trainer = Trainer(trial_class(context), context, enable_progress_bar=False)
        trainer.fit(max_length=Batch(4), checkpoints=checkpoints)
    (metadata,) = storage.glob("*/metadata.json")
    return metadata.parent


def runs(folder: Path, old: Path, **options: Any) -> TrialRuns:
    return TrialRuns(TrialOptions("model_def:MyTrial", folder, HPARAMS, checkpoint=str(old), **options))


@pytest.mark.slow
def test_checkpoint_loads_and_validates(folder: Path, old: Path) -> None:
    found = runs(folder, old)
    checks.loads(found)
    checks.reproduces_metrics(found)


@pytest.mark.slow
def test_other_metrics_fail(folder: Path, old: Path, tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(CORRECT.replace('"validation_loss": self', '"validation_loss": 2 * self'))
    with pytest.raises(CheckFailed, match=r"'validation_loss' was .* when the checkpoint was written, and is .* apart"):
        checks.reproduces_metrics(runs(tmp_path, old))
    checks.reproduces_metrics(runs(tmp_path, old, tolerance=0.6))


@pytest.mark.slow
def test_changed_model_fails_with_keys(old: Path, tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(CORRECT.replace("nn.Linear(4, 1)", "nn.Linear(4, 1, bias=False)"))
    with pytest.raises(CheckFailed, match=r'(?s)while a checkpoint is loaded.*Unexpected key\(s\).*"bias"'):
        checks.loads(runs(tmp_path, old))


@pytest.mark.slow
def test_given_metrics_are_compared(folder: Path, old: Path, tmp_path: Path) -> None:
    silent = tmp_path / old.name
    shutil.copytree(old, silent)
    metadata = json.loads((silent / "metadata.json").read_text())
    metric = metadata.pop("metric")["value"]
    del metadata["metadata_crc32c"]
    (silent / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(NotCompared, match=r"--trial-metrics. The validation here gives validation_loss \d"):
        checks.reproduces_metrics(runs(folder, silent))
    checks.reproduces_metrics(runs(folder, silent, metrics={"validation_loss": metric}))


def test_missing_checkpoint_is_named(folder: Path) -> None:
    with pytest.raises(CheckFailed, match=r"--trial-checkpoint .*gone cannot be read"):
        checks.loads(runs(folder, folder / "gone"))
