"""Which checkpoint "last" is, and what happens where it is damaged."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage
from tests.checkpoint import made_checkpoints
from tests.checkpoint.storage.backends import write


def train(storage: Path, length: int, latest: str | None = None, **writing: Any) -> int:
    """Train with a checkpoint after each second batch; return the batch at which the run began."""
    return made_checkpoints.train(storage, length, latest, **writing).context.get_initial_batch()


def by_steps(storage: Path) -> dict[int, Path]:
    """Return the directories of the checkpoints by their numbers of batches; of several the one written last."""
    found = sorted(storage.glob("*/metadata.json"), key=lambda path: path.stat().st_mtime_ns)
    return {json.loads(path.read_text())["steps_completed"]: path.parent for path in found}


def test_last_is_newest_after_a_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 4)
    before, now = {*tmp_path.rglob("*")}, time.time
    monkeypatch.setattr(time, "time", lambda: now() - 1e6)
    assert train(tmp_path, 8, "last") == 4
    for path in {*tmp_path.rglob("*")} - before:  # whose times such a clock would have written too
        os.utime(path, (path.stat().st_atime - 1e6, path.stat().st_mtime - 1e6))
    assert train(tmp_path, 10, "last") == 8


def test_run_from_an_earlier_checkpoint_becomes_the_newest(tmp_path: Path) -> None:
    train(tmp_path, 8)
    assert train(tmp_path, 6, str(by_steps(tmp_path)[4])) == 4
    assert train(tmp_path, 8, "last") == 6


NOW = time.time()
AHEAD = NOW + 3 * 86400
WRITTEN_LAST = {
    "later": [(1, NOW - 20, NOW - 10), (9, NOW - 30, NOW - 5)],
    "a copied storage, whose file times are those of the copy": [(5, NOW - 20, NOW), (5, NOW - 30, NOW + 1)],
    "a time in the future does not count": [(5, NOW - 20, NOW - 10), (9, AHEAD, NOW - 30)],
    "a time that is no time does not count: the file's": [
        (steps, wrong, NOW - 10 * steps)
        for steps, wrong in enumerate([None, "now", 1e300, float("inf"), float("nan"), -5, True, 10**400, [1]], 1)
    ],
    "a trial whose clock was ahead by a minute": [(5, NOW + 60.001, NOW), (4, NOW + 60, NOW + 60)],
    "a trial whose clock was ahead by days, then set back": [(5, AHEAD + 1, NOW - 9), (4, AHEAD, AHEAD)],
    "a trial after another one whose clock was ahead": [(1, NOW - 5, NOW - 5), (4, AHEAD, AHEAD)],
}


@pytest.mark.parametrize("written", WRITTEN_LAST.values(), ids=WRITTEN_LAST)
@pytest.mark.parametrize("order", [1, -1])
def test_newest_is_what_was_written_last(tmp_path: Path, written: list[tuple[int, Any, float]], order: int) -> None:
    """Each is a number of batches, the time in the metadata and the file's; the first is the newest."""
    storage = CheckpointStorage(tmp_path)
    expected = {}
    for steps, noted, file_time in written[::order]:
        checkpoint_id = write(storage, steps, {"time": noted})
        os.utime(tmp_path / checkpoint_id / "metadata.json", (file_time, file_time))
        expected[steps, file_time] = str(tmp_path / checkpoint_id)
    assert [*storage.newest_first()] == [expected[steps, file_time] for steps, _, file_time in written]


def test_trial_whose_clock_is_ahead_keeps_its_order(tmp_path: Path) -> None:
    """Both the time in the metadata and the file's are not true; another trial, which was written before, is older."""
    storage = CheckpointStorage(tmp_path)
    own = {"experiment": "e", "trial": "t"}
    times: list[tuple[int, dict[str, Any]]] = [(1, {**own, "time": NOW - 50}), (2, {**own, "time": AHEAD})]
    times.append((3, {"time": NOW - 60}))
    ids = [write(storage, steps, notes) for steps, notes in times]
    os.utime(tmp_path / ids[1] / "metadata.json", (AHEAD, AHEAD))
    assert [*storage.newest_first()] == [str(tmp_path / ids[number]) for number in (1, 0, 2)]


# Damage


@pytest.fixture(scope="module")
def six_batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    storage, code = tmp_path_factory.mktemp("storage"), tmp_path_factory.mktemp("code")
    train(storage, 6, code_dir=code)
    return storage


@pytest.fixture
def trained(six_batches: Path, tmp_path: Path) -> Path:
    """A storage with the checkpoints of a run of six batches."""
    return Path(shutil.copytree(six_batches, tmp_path / "storage"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut off": lambda checkpoint: truncate(checkpoint / "state_dict.pth"),
    "gone": lambda checkpoint: (checkpoint / "resume.pth").unlink(),
    "metadata": lambda checkpoint: (checkpoint / "metadata.json").write_text("{"),
    "progress": lambda checkpoint: (checkpoint / "trial_state.pkl").write_bytes(b"\x80\x04K"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_newest_falls_back(
    trained: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    known = by_steps(trained)
    damage(known[6])
    with pytest.raises(errors.CheckpointError, match=known[6].name):
        train(trained, 8, "last", fall_back=False)
    assert train(trained, 8, "last") == 4
    (warning,) = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert known[6].name in warning
    assert known[4].name in warning


def test_several_damaged_are_skipped(trained: Path) -> None:
    known = by_steps(trained)
    for steps in (6, 4):
        truncate(known[steps] / "state_dict.pth")
    with pytest.raises(errors.IncompleteCheckpointError, match=known[6].name):
        train(trained, 6, known[6].name)  # one that is named never falls back
    assert train(trained, 3, "last") == 2
    for checkpoint in by_steps(trained).values():
        truncate(checkpoint / "state_dict.pth")
    with pytest.raises(errors.IncompleteCheckpointError, match=by_steps(trained)[3].name):
        train(trained, 6, "last")


def test_restarted_job_skips_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr("det_lightning.pytorch._trainer._fits", iter([1, 1]))
    train(tmp_path, 6)
    truncate(by_steps(tmp_path)[6] / "state_dict.pth")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path, 8) == 4
