"""The task of a trial, as the runner of an experiment passes it to the trial's processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning.core._task import TASK_VARIABLE, TrialTask


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialTask:
    """A run of a trial, which this process becomes."""
    config = {"data": {"url": "here"}, "searcher": {"name": "single"}, "debug": True}
    checkpoints = str(tmp_path / "checkpoints")
    task = TrialTask(tmp_path / "trial", 3, 2, 1, 42, {"lr": 0.1}, config, [0], checkpoints, "some-id", 7)
    task.directory.mkdir()
    task.write()
    monkeypatch.setenv(TASK_VARIABLE, str(task.file))
    return task
