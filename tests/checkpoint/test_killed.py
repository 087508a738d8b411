"""A training that is killed at any moment, also while it writes a checkpoint, ends bit-equal to one that is not."""

from __future__ import annotations

import fcntl
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from det_lightning import pytorch
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, Retention, TrialState
from tests.checkpoint.trainings import train
from tests.launching import environment
from tests.warm_python import start_warm_python

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "soak" / "kill_training.py"


def test_killed_training_ends_bit_equal(tmp_path: Path) -> None:
    arguments = ["--kills", "12", "--seed", "1", "--json", "outcome.json"]
    subprocess.run([start_warm_python().executable, SCRIPT, *arguments], cwd=tmp_path, env=environment(), check=False)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["findings"] == []
    assert outcome["kills"] == 12
    # Some came in the middle of writing, and each of the four variants came to its end.
    assert outcome["torn"] > 0
    assert outcome["ends"] >= 4


def test_marks_of_killed_writers_are_removed(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    marks = tmp_path / ".det_lightning" / "staging"
    marks.mkdir(parents=True)
    for name in ("killed.new", "alive.new"):
        (marks / name).write_text("")
    with (marks / "alive.new").open("r+b") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        storage.remove_leftovers()
        assert [path.name for path in marks.iterdir()] == ["alive.new"]
    storage.remove_leftovers()
    assert list(tmp_path.iterdir()) == []


def test_next_run_finishes_a_deletion(tmp_path: Path) -> None:
    """The next run has no checkpoint to write, after which it would try again."""
    writing: dict[str, Any] = {"period": pytorch.Batch(1), "retention": Retention(0, 0, 1)}
    train(tmp_path, 2, **writing)
    storage = CheckpointStorage(tmp_path)
    (kept,) = storage.list_ids()
    names = {name: storage.info(kept).metadata[name] for name in ("experiment", "trial")}
    storage.write(CheckpointContent({}, TrialState(batches_trained=1), notes={**names, "time": 1.0}))
    train(tmp_path, 2, kept, **writing)
    assert [path.name for path in tmp_path.iterdir()] == [kept]
