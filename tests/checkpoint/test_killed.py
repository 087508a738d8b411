"""A training that is killed at any moment, also while it writes a checkpoint, ends bit-equal to one that is not."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning import pytorch
from det_lightning.checkpoint import CheckpointStorage, Retention
from det_lightning.checkpoint.retention.rule import CheckpointRecord
from det_lightning.checkpoint.retention.trial_index import TrialIndex, read_indexes
from tests.trials import SmallTrial, seed_everything

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "soak" / "kill_training.py"


def test_a_training_killed_a_dozen_times_ends_bit_equal(tmp_path: Path) -> None:
    arguments = ["--kills", "12", "--seed", "1", "--json", "outcome.json"]
    subprocess.run([sys.executable, str(SCRIPT), *arguments], cwd=tmp_path, check=False)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["findings"] == []
    assert outcome["kills"] == 12
    # Some came in the middle of writing, and each of the four variants came to its end.
    assert outcome["torn"] > 0
    assert outcome["ends"] >= 4


def test_an_unfinished_marker_of_a_killed_writer_is_removed_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    marks = tmp_path / ".det_lightning" / "partial"
    marks.mkdir(parents=True)
    for name in ("killed.new", "alive.new"):
        (marks / name).write_text("")
    with (marks / "alive.new").open("r+b") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        storage.remove_abandoned()
        assert [path.name for path in marks.iterdir()] == ["alive.new"]
    storage.remove_abandoned()
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_index_of_a_killed_writer_is_removed_when_that_index_is_next_written(tmp_path: Path) -> None:
    index = TrialIndex(CheckpointStorage(tmp_path).root, "experiment", "trial")
    index.add(CheckpointRecord("checkpoint", "trial", 1, 1.0))
    folder = tmp_path / ".det_lightning" / "index" / "experiment"
    for name in (".trial.json.123.tmp", ".trial2.json.123.tmp"):
        (folder / name).write_text("{")
    index.add(CheckpointRecord("another", "trial", 2, 2.0))
    assert sorted(path.name for path in folder.iterdir()) == [".trial2.json.123.tmp", "trial.json"]


def train(storage: Path, length: int) -> None:
    """Train with the rule that only the latest checkpoint is kept."""
    seed_everything()
    with pytorch.init(enable_tensorboard_logging=False) as context:
        pytorch.Trainer(SmallTrial(context), context, enable_progress_bar=False).fit(
            max_length=pytorch.Batch(length),
            checkpoint_period=pytorch.Batch(1),
            checkpoint_policy="none",
            checkpoint_storage=storage,
            latest_checkpoint="last",
            retention=Retention(0, 0, 1),
        )


def test_a_checkpoint_that_a_kill_kept_out_of_the_index_is_found(tmp_path: Path) -> None:
    """Without its entry in the index it would never be deleted."""
    storage = CheckpointStorage(tmp_path)
    for length in (2, 4):
        train(tmp_path, length)
        (index,) = read_indexes(storage.root)
        assert [record.id for record in index.records] == storage.list_ids()
        assert len(index.records) == 1
        index.remove([record.id for record in index.records])


def test_a_deletion_cut_off_by_a_kill_is_finished_by_the_next_run(tmp_path: Path) -> None:
    """The next run has no checkpoint to write, after which it would try again."""
    train(tmp_path, 2)
    storage = CheckpointStorage(tmp_path)
    (index,) = read_indexes(storage.root)
    (tmp_path / "half deleted" / "code").mkdir(parents=True)
    (tmp_path / "half deleted" / "load_data.json").write_text("{}")
    for name in ("half deleted", "deleted"):
        index.add(CheckpointRecord(name, index.trial, 1, 0.5))
    train(tmp_path, 2)
    (kept,) = storage.list_ids()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".det_lightning", kept]
    assert [record.id for record in read_indexes(storage.root)[0].records] == [kept]
