"""Runs that share a storage: none takes another one's name, or deletes what another one needs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage, Retention
from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
from det_lightning.checkpoint.retention.run_claims import RunClaims, delete_unless_used, own_trial, remove_dead_claims
from det_lightning.checkpoint.storage.claims import Claim
from tests.checkpoint.storage.backends import write
from tests.checkpoint.trainings import train
from tests.launching import environment
from tests.warm_python import start_warm_python

ROOT = Path(__file__).parents[2]
LATEST = Retention(0, 0, 1)


def trials_in(storage: Path) -> dict[int, str]:
    """Return the name of the trial of each checkpoint, by its number of batches."""
    found = [json.loads(path.read_text()) for path in storage.glob("*/metadata.json")]
    return {metadata["steps_completed"]: metadata["trial"] for metadata in found}


# Names


def test_name_of_a_resumed_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2, retention=LATEST)
    name = trials_in(tmp_path)[2]
    train(tmp_path, 4, "last", retention=LATEST)
    assert trials_in(tmp_path) == {4: name}
    other = RunClaims(CheckpointStorage(tmp_path))
    assert other.claim_trial(None, None, name) == name
    train(tmp_path, 8, "last", retention=LATEST)
    other.release()
    found = trials_in(tmp_path)
    assert [*sorted(found)] == [4, 8]
    assert found[4] == name != found[8]
    assert f"The trial {name} that this run resumes belongs to another run, process {os.getpid()}" in caplog.text


def test_name_of_a_live_run_is_refused(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    other = RunClaims(storage)
    other.claim_trial("digits", "a/b", None)
    with pytest.raises(errors.StorageError, match=rf"Trial 'a/b' in {tmp_path} belongs to another run, process"):
        RunClaims(storage).claim_trial("digits", "a/b", None)
    other.release()
    assert RunClaims(storage).claim_trial("digits", "a/b", None) == "a/b"


def test_impossible_name_is_not_used(tmp_path: Path) -> None:
    for name in ("../../x", "", None, 3, ["x"], ".x"):
        assert RunClaims(CheckpointStorage(tmp_path)).claim_trial(None, None, name) not in (name, "")


def test_run_leaves_no_claim_behind(tmp_path: Path) -> None:
    class Fails(pytorch.PyTorchCallback):
        def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
            raise ZeroDivisionError

    train(tmp_path, 2)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, 4, "last", Fails())
    assert not (tmp_path / ".det_lightning").exists()


def test_run_waits_for_pruning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = CheckpointStorage(tmp_path)
    with contextlib.ExitStack() as pruning:
        assert pruning.enter_context(own_trial(storage, "digits", "a"))
        monkeypatch.setattr("det_lightning.checkpoint.retention.run_claims.time.sleep", lambda _: pruning.close())
        assert RunClaims(storage).claim_trial("digits", "a", None) == "a"


def test_foreign_claim_stops_no_cleaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, take = tmp_path / ".det_lightning/runs", Claim.take
    folder.mkdir(parents=True)
    for name in ("a.json", "b.json"):
        (folder / name).write_text("{}")

    def refuse_first(file: Any) -> Claim | None:
        if file.name == "a.json":
            raise PermissionError(file.path)
        return take(file)

    monkeypatch.setattr(Claim, "take", refuse_first)
    remove_dead_claims(CheckpointStorage(tmp_path).root)
    assert [path.name for path in folder.iterdir()] == ["a.json"]


# Checkpoints that a run resumes


def test_resumed_checkpoint_is_kept(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    train(storage, 2, retention=LATEST)
    other = RunClaims(storage)
    assert other.use(str(storage.newest()))
    train(storage, 4, "last", retention=LATEST)
    assert sorted(trials_in(tmp_path)) == [2, 4]
    other.release()
    train(storage, 6, "last", retention=LATEST)
    assert [*trials_in(tmp_path)] == [6]


def test_resume_by_url_with_password() -> None:
    storage = CheckpointStorage(f"memory://me:password@{uuid.uuid4()}/storage")
    checkpoint_id = write(storage)
    claims = RunClaims(storage)
    notes = claims.trace_back(storage.find(checkpoint_id), checkpoint_id)
    assert notes["resumed_from"]["checkpoint"] == checkpoint_id
    assert not delete_unless_used(storage, checkpoint_id)
    claims.release()
    assert delete_unless_used(storage, checkpoint_id)


def test_no_resume_during_a_deletion(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    checkpoint_id = write(storage)
    mark = storage.root / ".det_lightning/in_use" / f"{checkpoint_id}.deleting.json"
    deleting = Claim.take(mark)
    assert deleting is not None
    claims, path = RunClaims(storage), storage.find(checkpoint_id)
    assert not claims.use(path)
    assert not delete_unless_used(storage, checkpoint_id)
    deleting.release()
    assert claims.use(path)
    assert not delete_unless_used(storage, checkpoint_id)
    claims.release()
    assert delete_unless_used(storage, checkpoint_id)
    assert not claims.use(path)
    assert [*tmp_path.iterdir()] == []


def test_newest_was_just_deleted(tmp_path: Path) -> None:
    class SharedStorage(CheckpointStorage):
        """One whose newest checkpoint is deleted by another run once it was found, until there is only one."""

        def newest_first(self, job: str | None = None) -> Iterator[str]:
            found = [*super().newest_first(job)]
            if len(found) > 1:
                assert delete_unless_used(self, found[0].rpartition("/")[2])
            return iter(found)

    train(tmp_path, 6)
    assert sorted(trials_in(tmp_path)) == [2, 4, 6]
    train(SharedStorage(tmp_path), 3, "last")
    assert sorted(trials_in(tmp_path)) == [2, 3]


@pytest.mark.parametrize("other", [b"[]", b'"text"', b"null", b"", b"{", b'{"token": "of another process"}', None])
def test_replaced_claim_is_not_taken(other: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = MemoryFileSystem.pipe_file

    def replace(self: MemoryFileSystem, path: str, content: bytes, **kwargs: Any) -> None:
        own(self, path, content if other is None else other, **kwargs)
        if other is None:
            self.rm_file(path)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", replace)
    assert Claim.take(CheckpointStorage(f"memory://{uuid.uuid4()}").root / ".det_lightning/runs/trial.json") is None


def test_resumed_from_another_storage(tmp_path: Path) -> None:
    here = CheckpointStorage(tmp_path / "here")
    elsewhere = CheckpointStorage(tmp_path / "elsewhere")
    checkpoint_id = write(elsewhere)
    claims = RunClaims(here)
    assert claims.use(elsewhere.find(checkpoint_id))
    assert not (tmp_path / "elsewhere/.det_lightning").exists()
    claims.release()
    (tmp_path / "elsewhere/.det_lightning/partial").mkdir(parents=True)
    assert claims.use(elsewhere.find(checkpoint_id))
    assert not delete_unless_used(elsewhere, checkpoint_id)


def test_prune_respects_live_runs(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    ids: dict[str, list[str]] = {}
    for trial in ("live", "used", "over"):
        notes = {"experiment": trial, "trial": trial}
        ids[trial] = [write(storage, steps, {**notes, "time": float(steps)}) for steps in (1, 2, 3)]
    run = RunClaims(storage)
    run.claim_trial(None, "live", None)
    run.use(storage.find(ids["used"][0]))
    plan = plan_pruning(storage, LATEST)
    assert sorted(plan.in_use) == sorted([*ids["live"][:2], ids["used"][0]])
    assert sorted(carry_out(plan, storage)) == sorted([ids["used"][1], *ids["over"][:2]])
    assert set(plan.in_use) <= set(storage.list_ids())
    run.release()
    assert sorted(plan_pruning(storage, LATEST).to_delete) == sorted([*ids["live"][:2], ids["used"][0]])


# Processes that end without a word

CLAIMS = """
import os, sys, time
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.checkpoint.retention.run_claims import RunClaims

claims = RunClaims(CheckpointStorage(sys.argv[1]))
print(claims.claim_trial(None, None, "trial"), flush=True)
if os.fork() == 0:  # as a worker of a loader does, which outlives a killed parent for some time
    print("forked", flush=True)
time.sleep(60)
"""


def test_name_of_a_killed_run_is_free(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CLAIMS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True) as process:
        assert process.stdout is not None
        assert {process.stdout.readline().strip(), process.stdout.readline().strip()} == {"trial", "forked"}
        assert RunClaims(storage).claim_trial(None, None, "trial") != "trial"
        process.kill()
        process.wait()
        claims = RunClaims(storage)
        assert claims.claim_trial(None, None, "trial") == "trial"
        os.killpg(process.pid, signal.SIGKILL)
    claims.release()
    remove_dead_claims(storage.root)
    assert not (tmp_path / ".det_lightning").exists()


# Storages without locks


@pytest.fixture
def in_memory() -> CheckpointStorage:
    return CheckpointStorage(f"memory://shared-{time.time_ns()}")


DEAD = object()  # the id of a process that has ended


def change_claim(storage: CheckpointStorage, **changes: Any) -> None:
    """Make the claim of a trial's name that of another process."""
    if changes.get("pid") is DEAD:
        with subprocess.Popen(["true"]) as process:
            changes["pid"] = process.pid
    (name,) = storage.root.find_files()
    (storage.root / name).write(json.dumps({**json.loads((storage.root / name).read()), **changes}).encode())


@pytest.mark.parametrize(
    ("changes", "is_free"),
    [
        ({"machine": "elsewhere"}, False),
        ({"machine": "elsewhere", "renewed": 1e300}, False),
        ({"pid": DEAD}, True),
        ({"token": "of an earlier process with this id"}, True),
    ],
    ids=["on another machine", "an odd time", "ended here", "ended here long ago"],
)
def test_remote_claim_of_a_live_process(in_memory: CheckpointStorage, changes: dict[str, Any], is_free: bool) -> None:
    RunClaims(in_memory).claim_trial(None, "trial", None)
    change_claim(in_memory, **changes)
    remove_dead_claims(in_memory.root)
    assert (RunClaims(in_memory).claim_trial(None, None, "trial") == "trial") == is_free


def test_remote_claim_expires(in_memory: CheckpointStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    RunClaims(in_memory).claim_trial(None, "trial", None)
    change_claim(in_memory, machine="elsewhere")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3 * 3600)
    assert RunClaims(in_memory).claim_trial(None, None, "trial") == "trial"


@pytest.mark.parametrize("is_taken", [True, False])
def test_suspended_run(in_memory: CheckpointStorage, monkeypatch: pytest.MonkeyPatch, is_taken: bool) -> None:
    suspended = RunClaims(in_memory)
    suspended.claim_trial(None, "trial", None)
    change_claim(in_memory, machine="elsewhere")
    now = time.time
    with monkeypatch.context() as later:
        later.setattr(time, "time", lambda: now() + 3 * 3600)
        remove_dead_claims(in_memory.root)
        if is_taken:
            RunClaims(in_memory).claim_trial(None, "trial", None)
            with pytest.raises(errors.StorageError, match=r"belongs to another run now, process .*suspended"):
                suspended.renew()
            suspended.release()
        else:
            suspended.renew()
    with pytest.raises(errors.StorageError, match=r"Trial 'trial' .* belongs to another run, process"):
        RunClaims(in_memory).claim_trial(None, "trial", None)


def test_too_large_claim_is_not_read(in_memory: CheckpointStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    RunClaims(in_memory).claim_trial(None, "trial", None)
    (file,) = in_memory.root.find_files()
    (in_memory.root / file).write(b" " * 2_000_000)
    read = MemoryFileSystem.cat_file
    contents: list[bytes] = []

    def note(*arguments: Any, **options: Any) -> bytes:
        contents.append(read(*arguments, **options))
        return contents[-1]

    monkeypatch.setattr(MemoryFileSystem, "cat_file", note)
    with pytest.raises(errors.StorageError, match=rf"{file} has 2,000,000 bytes; at most 65,536 .*: remove the file"):
        RunClaims(in_memory).claim_trial(None, "trial", None)
    assert [len(content) for content in contents] == [65_537]
    with pytest.raises(errors.StorageError, match="65,536"):
        remove_dead_claims(in_memory.root)


# Storages that vanish


class Removes(pytorch.PyTorchCallback):
    """Removes what was written, once a number of checkpoints is complete."""

    def __init__(self, storage: CheckpointStorage, after: int) -> None:
        self.storage, self.after = storage, after
        self.seen: list[str] = []

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.seen.append(uuid)
        if len(self.seen) == self.after:
            self.storage.root.remove()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "after", "async_write"),
    [("local", 1, True), ("local", 4, False), ("memory", 1, False), ("memory", 2, True)],
)
def test_vanished_are_named_at_the_end(
    tmp_path: Path, kind: str, after: int, async_write: bool, in_memory: CheckpointStorage
) -> None:
    storage = CheckpointStorage(tmp_path / "storage") if kind == "local" else in_memory
    callback = Removes(storage, after)
    with pytest.raises(errors.StorageError, match=f"{after} checkpoints that this run has written") as raised:
        train(storage, 8, callback=callback, async_write=async_write)
    assert [name in str(raised.value) for name in callback.seen] == [True] * after + [False] * (4 - after)
    # What was trained is not lost with them.
    assert sorted(storage.list_ids()) == sorted(callback.seen[after:])


def test_vanished_are_reported_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reported: list[bool] = []

    class Looks(Removes):
        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            reported.append("no longer exist" in caplog.text)

    with pytest.raises(errors.StorageError):
        train(tmp_path / "storage", 8, callback=Looks(CheckpointStorage(tmp_path / "storage"), 1))
    assert reported == [False, False, True, True]


@pytest.mark.slow
def test_two_processes_share_a_storage(tmp_path: Path) -> None:
    command = [start_warm_python().executable, str(ROOT / "tests/soak/share_storage.py")]
    arguments = ["--rounds", "2", "--runs", "3", "--json", "outcome.json"]
    subprocess.run([*command, *arguments], cwd=tmp_path, env=environment(), check=False)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["findings"] == []
    assert outcome["rounds"] == 2
    # They were trials of their own.
    assert outcome["trials"] >= 6
