"""A training of an Estimator that is asked to end saves, ends with the status of all trials, and resumes exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")

from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage
from tests.launching import environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")]


def train(folder: Path, where: str = "nowhere", *latest: str) -> int:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.estimator.preempted", str(folder), where, *latest]
    return subprocess.run(command, env=environment(TF_CPP_MIN_LOG_LEVEL="3"), timeout=300).returncode


def end_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "end.json").read_text())
    return found


def steps_of(folder: Path) -> list[int]:
    storage = CheckpointStorage(folder / "checkpoints")
    return [storage.read_metadata(name)["steps_completed"] for name in storage.list_ids()]


# The sixth run of an evaluation is in the second one, after eight batches.
@pytest.mark.parametrize(("where", "steps"), [("training", 6), ("evaluation", 8)])
def test_sigterm_saves_and_resumes_exactly(where: str, steps: int, tmp_path: Path) -> None:
    assert train(tmp_path / "whole") == 0
    whole = end_of(tmp_path / "whole")
    assert train(tmp_path / "parts", where) == errors.PREEMPTED_EXIT_CODE == 75
    assert steps_of(tmp_path / "parts") == [steps]
    assert train(tmp_path / "parts", "nowhere", "last") == 0
    resumed = end_of(tmp_path / "parts")
    assert resumed["losses"] == whole["losses"][steps:]
    assert resumed["validations"][-1] == whole["validations"][-1]
