"""A trial that is started again resumes from what it wrote itself, whatever that holds, and from nothing forged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from det_lightning.checkpoint import CheckpointStorage
from det_lightning.checkpoint.format.layout import digest_file
from tests.experiments.running import events_of, run

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "name": "keeping",
    "entrypoint": "keeping_trial:KeepingTrial",
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 8}},
    "min_checkpoint_period": {"batches": 4},
    "reproducibility": {"experiment_seed": 7},
    "max_restarts": 2,
}


def run_experiment(folder: Path, *options: object, forges: bool, ends_with: int = 0) -> tuple[Path, str]:
    """Run the trial; return the directory of the experiment, and what the trial wrote."""
    project = folder / "project"
    project.mkdir()
    for name in ("linear_trial.py", "keeping_trial.py"):
        (project / name).write_bytes(Path(__file__).with_name(name).read_bytes())
    hparams = {"lr": 0.1, "global_batch_size": 8, "forges": forges}
    (project / "config.yaml").write_text(json.dumps({**CONFIG, "hyperparameters": hparams}))
    arguments = ("run", project / "config.yaml", project, "--experiments", folder, *options)
    run(*arguments, ends_with=ends_with, is_warm=True)
    experiment = folder / "keeping-1"
    return experiment, (experiment / "trials" / "1" / "log.txt").read_text()


def test_trial_resumes_from_its_own_objects(tmp_path: Path) -> None:
    experiment, log = run_experiment(tmp_path, forges=False)
    assert "callbacks['keeper']['meter'] is a keeping_trial.Meter: a resume needs trusted=True" in log
    assert log.count("resumed with the meter at 1\n") == 1
    latest = events_of(experiment, "checkpoint")[-1]
    path = Path(CheckpointStorage(experiment / "checkpoints").find(latest["checkpoint_id"]))
    assert latest["sha256"] == [digest_file(path / "state_dict.pth"), digest_file(path / "resume.pth")]


def test_foreign_file_is_refused(tmp_path: Path) -> None:
    experiment, log = run_experiment(tmp_path, forges=True, ends_with=1)
    assert "reading the file could run code" in log
    assert "resumed" not in log
    assert not [*experiment.rglob("code-was-run")]


def test_trusted_experiment_reads_anything(tmp_path: Path) -> None:
    experiment, log = run_experiment(tmp_path, "--trusted", forges=True)
    assert "resumed with the meter at 1\n" in log
    assert [*experiment.rglob("code-was-run")]
