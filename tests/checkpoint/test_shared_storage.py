"""Runs that share a storage: a trial has one writer, and a checkpoint that vanishes is an error that says so."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
