"""Runs that share a storage, and which checkpoint "last" is: one writer a trial, and errors where any vanishes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage, Retention, open_checkpoint, read_checkpoint
from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
from det_lightning.checkpoint.retention.trial_checkpoints import TrialLock, lock_trial
from tests.checkpoint.made_checkpoints import train
from tests.checkpoint.storage.backends import write

ROOT = Path(__file__).parents[2]
LATEST = Retention(0, 0, 1)


def trials_in(storage: Path) -> dict[int, str]:
    """Return the name of the trial of each checkpoint, by its number of batches."""
    found = [json.loads(path.read_text()) for path in storage.glob("*/metadata.json")]
    return {metadata["steps_completed"]: metadata["trial"] for metadata in found}


# Names


def locked(storage: CheckpointStorage, given: str | None = None, inherited: object = None) -> tuple[str, TrialLock]:
    return lock_trial(storage.root, "digits", given, inherited)


def test_resumed_run_keeps_the_name_of_its_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2, retention=LATEST)
    name = trials_in(tmp_path)[2]
    train(tmp_path, 4, "last", retention=LATEST)
    assert trials_in(tmp_path) == {4: name}
    _, other = lock_trial(CheckpointStorage(tmp_path).root, None, None, name)
    train(tmp_path, 8, "last", retention=LATEST)
    other.release()
    found = trials_in(tmp_path)
    assert [*sorted(found)] == [4, 8]
    assert found[4] == name != found[8]
    assert f"The trial {name} that this run resumes belongs to another run, process {os.getpid()}" in caplog.text


def test_name_of_a_live_run_is_refused(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    _, lock = locked(storage, "a/b")
    host = socket.gethostname()
    message = rf"Trial 'a/b' in {tmp_path} belongs to another run, process {os.getpid()} on '{host}'\. Wait for the end"
    with pytest.raises(errors.StorageError, match=message):
        locked(storage, "a/b")
    assert lock_trial(storage.root, "another experiment", "a/b", None)[0] == "a/b"
    lock.release()
    assert locked(storage, "a/b")[0] == "a/b"


def test_impossible_name_is_not_used(tmp_path: Path) -> None:
    for name in ("../../x", "", None, 3, ["x"], ".x"):
        assert locked(CheckpointStorage(tmp_path), None, name)[0] not in (name, "")


def test_bucket_has_no_locks() -> None:
    """As the page says: one writer per trial is up to the user there."""
    storage = CheckpointStorage(f"memory://shared-{time.time_ns()}")
    assert locked(storage, "a")[0] == locked(storage, "a")[0] == "a"
    assert storage.root.find_files() == {}


def test_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    class Fails(pytorch.PyTorchCallback):
        def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
            raise ZeroDivisionError

    train(tmp_path, 2)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, 4, "last", Fails())
    assert not (tmp_path / ".det_lightning").exists()


def test_run_waits_for_pruning(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    pruning = TrialLock.take(storage.root, "digits", "a")
    assert pruning is not None
    threading.Timer(0.5, pruning.release).start()
    assert locked(storage, "a")[0] == "a"


def test_prune_respects_live_runs(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    ids: dict[str, list[str]] = {}
    for trial in ("live", "over"):
        notes = {"experiment": "digits", "trial": trial}
        ids[trial] = [write(storage, steps, {**notes, "time": float(steps)}) for steps in (1, 2, 3)]
    _, lock = locked(storage, "live")
    plan = plan_pruning(storage, LATEST)
    assert sorted(plan.in_use) == sorted(ids["live"][:2])
    assert carry_out(plan, storage) == ids["over"][:2]
    lock.release()
    plan = plan_pruning(storage, LATEST)
    assert plan.to_delete == ids["live"][:2]
    _, lock = locked(storage, "live")  # a run has begun since
    assert carry_out(plan, storage) == []
    lock.release()


# Checkpoints that vanish while they are read


class Vanishing(CheckpointStorage):
    """One whose newest checkpoint is deleted by another run once it was found."""

    def newest_first(self, job: str | None = None) -> Iterator[str]:
        found = [*super().newest_first(job)]
        self.delete(found[0].rpartition("/")[2])
        return iter(found)


def test_last_falls_back_when_it_vanishes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 6)
    train(Vanishing(tmp_path), 5, "last")
    assert sorted(trials_in(tmp_path)) == [2, 4, 5]
    assert "The run resumes from the checkpoint before" in caplog.text


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_vanished_checkpoint_says_so(tmp_path: Path, kind: str) -> None:
    storage = CheckpointStorage(tmp_path if kind == "local" else f"memory://vanishing-{time.time_ns()}")
    checkpoint_id = write(storage)
    url = storage.find(checkpoint_id)

    def read() -> None:
        with open_checkpoint(url, progress=lambda *_: storage.delete(checkpoint_id)) as directory:
            if storage.is_local:
                storage.delete(checkpoint_id)
            read_checkpoint(directory)

    with pytest.raises(errors.CheckpointNotFound, match=f"{checkpoint_id} was deleted while it was read"):
        read()


# Processes that end without a word

LOCKS = """
import os, sys, time
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.checkpoint.retention.trial_checkpoints import lock_trial

name, lock = lock_trial(CheckpointStorage(sys.argv[1]).root, "digits", None, "trial")
print(name, flush=True)
if os.fork() == 0:  # as a worker of a loader does, which outlives a killed parent for some time
    print("forked", flush=True)
time.sleep(60)
"""


def test_name_of_a_killed_run_is_free(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOCKS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True) as process:
        assert process.stdout is not None
        assert {process.stdout.readline().strip(), process.stdout.readline().strip()} == {"trial", "forked"}
        name, lock = locked(storage, None, "trial")
        assert name != "trial"
        lock.release()
        process.kill()
        process.wait()
        name, lock = locked(storage, None, "trial")
        assert name == "trial"
        os.killpg(process.pid, signal.SIGKILL)
    lock.release()
    assert not (tmp_path / ".det_lightning").exists()


# Storages that vanish


@pytest.mark.slow
@pytest.mark.parametrize("async_write", [False, True])
def test_vanished_are_named_at_the_end(tmp_path: Path, async_write: bool) -> None:
    class Removes(pytorch.PyTorchCallback):
        """Removes the storage once two checkpoints are complete."""

        def on_checkpoint_upload_end(self, uuid: str) -> None:
            seen.append(uuid)
            if len(seen) == 2:
                storage.root.remove()

    storage, seen = CheckpointStorage(tmp_path / "storage"), list[str]()
    with pytest.raises(errors.StorageError, match="2 checkpoints that this run has written") as raised:
        train(storage, 8, callback=Removes(), async_write=async_write)
    assert [name in str(raised.value) for name in seen] == [True, True, False, False]
    # What was trained is not lost with them.
    assert sorted(storage.list_ids()) == sorted(seen[2:])


# Which checkpoint "last" is, and what happens where it is damaged


def train_from(storage: Path, length: int, latest: str | None = None, **writing: Any) -> int:
    """Train with a checkpoint after each second batch; return the batch at which the run began."""
    return train(storage, length, latest, **writing).context.get_initial_batch()


def by_steps(storage: Path) -> dict[int, Path]:
    """Return the directories of the checkpoints by their numbers of batches; of several the one written last."""
    found = sorted(storage.glob("*/metadata.json"), key=lambda path: path.stat().st_mtime_ns)
    return {json.loads(path.read_text())["steps_completed"]: path.parent for path in found}


def test_last_is_newest_after_a_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_from(tmp_path, 4)
    before, now = {*tmp_path.rglob("*")}, time.time
    monkeypatch.setattr(time, "time", lambda: now() - 1e6)
    assert train_from(tmp_path, 8, "last") == 4
    for path in {*tmp_path.rglob("*")} - before:  # whose times such a clock would have written too
        os.utime(path, (path.stat().st_atime - 1e6, path.stat().st_mtime - 1e6))
    assert train_from(tmp_path, 10, "last") == 8


def test_run_from_an_earlier_checkpoint_becomes_the_newest(tmp_path: Path) -> None:
    train_from(tmp_path, 8)
    assert train_from(tmp_path, 6, str(by_steps(tmp_path)[4])) == 4
    assert train_from(tmp_path, 8, "last") == 6


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
    train_from(storage, 6, code_dir=code)
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
        train_from(trained, 8, "last", fall_back=False)
    assert train_from(trained, 8, "last") == 4
    (warning,) = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert known[6].name in warning
    assert known[4].name in warning


def test_restarted_job_skips_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr("det_lightning.pytorch._trainer._fits", iter([1, 1]))
    train_from(tmp_path, 6)
    truncate(by_steps(tmp_path)[6] / "state_dict.pth")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train_from(tmp_path, 8) == 4


def test_several_damaged_are_skipped(trained: Path) -> None:
    known = by_steps(trained)
    for steps in (6, 4):
        truncate(known[steps] / "state_dict.pth")
    with pytest.raises(errors.IncompleteCheckpointError, match=known[6].name):
        train_from(trained, 6, known[6].name)  # one that is named never falls back
    assert train_from(trained, 3, "last") == 2
    for checkpoint in by_steps(trained).values():
        truncate(checkpoint / "state_dict.pth")
    with pytest.raises(errors.IncompleteCheckpointError, match=by_steps(trained)[3].name):
        train_from(trained, 6, "last")
