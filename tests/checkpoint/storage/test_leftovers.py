"""Leftovers of killed writers are removed, and nothing else: nothing outside, and no checkpoint of another program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage, Retention, load_checkpoint
from det_lightning.checkpoint.format.layout import STAGING_MARK
from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
from det_lightning.checkpoint.storage.location import is_own_id, new_id
from det_lightning.engine.checkpointing import clean
from det_lightning.files.local_files import write_whole
from tests.checkpoint.storage.backends import Backend, all_paths, backend_of, write
from tests.launching import environment
from tests.trials import SmallTrial, fit_trial
from tests.warm_python import start_warm_python

IN_TWO_DAYS = time.time() + 2 * 86400


# Ids


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0b", ".det_lightning", ".Det_Lightning"])
def test_name_that_leads_out_is_no_id(backend: Backend, name: str) -> None:
    storage = backend.storage()
    kept = write(storage)
    takers: list[Callable[[str], object]] = [storage.root.checkpoint, storage.stage, storage.delete]
    takers += [storage.info]
    takers += [lambda name: storage.replace(name, kept), lambda name: storage.replace(kept, name)]
    for take in takers:
        with pytest.raises(errors.CheckpointNotFound, match="There is no checkpoint"):
            take(name)
    assert not storage.is_complete(name)
    with pytest.raises(errors.StorageError, match="cannot be the name of a file"):
        storage.root.bookkeeping("staging", name)
    assert storage.list_ids() == [kept]


def test_ids_are_uuids_with_or_without_a_prefix() -> None:
    own = "0b7f3c1e-52a9-4d0c-8f6e-9a1d2c3b4e5f"
    others = ["epoch=1-step=20", f"epoch{own}", f"../{own}", f"../x-{own}", f"{own}.new", own.upper()]
    found = [name for name in (own, f"epoch=1-step=20-{own}", *others) if is_own_id(name)]
    assert found == [own, f"epoch=1-step=20-{own}"]


def test_bucket_keys_that_lead_out_are_ignored(s3_options: dict[str, Any], tmp_path: Path) -> None:
    storage = backend_of("s3", tmp_path, s3_options).storage()
    kept = write(storage)
    for name in ("..", ".", "a\\b"):
        storage.root.fs.pipe_file(f"{storage.root.path}/{name}/metadata.json", b"{}")
    assert storage.list_ids() == [kept]
    for name in ("..", "a\\b"):
        with pytest.raises(errors.CheckpointNotFound, match="cannot be the name of a checkpoint"):
            load_checkpoint(f"{storage.root}/{name}", s3_options)


# Marks


def test_marks_for_foreign_directories_delete_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks look like those of a writer that was killed: no process holds a lock on them."""
    above, storage = backend.storage(), backend.storage("/storage")
    kept = write(storage)
    for path in ("precious", "storage/precious", "storage/datasets/precious"):
        (above.root / path).write(b"precious")
    for mark in ("...lock", "..lock", ".lock", "datasets.lock", "datasets.new", f"{kept}.lock", "..new"):
        (storage.root / ".det_lightning/staging" / mark).write(b"")
    before = {path: (above.root / path).read() for path in all_paths(above) if "staging" not in path}
    with monkeypatch.context() as later:
        later.setattr(time, "time", lambda: IN_TWO_DAYS)
        assert storage.remove_leftovers() == []
        carry_out(plan_pruning(storage, Retention()), storage)
    assert {path: (above.root / path).read() for path in all_paths(above) if "staging" not in path} == before
    assert storage.list_ids() == [kept]


def leave_incomplete(storage: Path, *names: str) -> Path:
    """Make what a killed writer leaves: a directory without metadata, and its mark."""
    partial = storage / new_id()
    for file in (*(partial / name for name in names), storage / ".det_lightning/staging" / f"{partial.name}.lock"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    partial.mkdir(exist_ok=True)
    return partial


@pytest.mark.parametrize("held", [[], ["code/model_def.py"], ["load_data.json", "state_dict.pth"], ["a script's.txt"]])
def test_leftovers_are_recognized(tmp_path: Path, held: list[str]) -> None:
    partial = leave_incomplete(tmp_path, *held)
    assert CheckpointStorage(tmp_path).remove_leftovers() == [partial.name]
    assert [*tmp_path.iterdir()] == []


# Removing


def test_delete_refuses_other_directories(backend: Backend) -> None:
    storage = backend.storage()
    kept = write(storage)
    metadata = {"experiment": "e", "trial": "t", "steps_completed": 1, "time": 1.0}
    (storage.root / "datasets/images").write(b"precious")
    (storage.root / "datasets/metadata.json").write(json.dumps(metadata).encode())
    (storage.root / "datasets/checkpoint.pt").write(b"another program's")
    with pytest.raises(errors.CheckpointNotFound, match="datasets is not a checkpoint, and is not deleted"):
        storage.delete("datasets")
    carry_out(plan_pruning(storage, Retention(0, 0, 1)), storage)
    assert (storage.root / "datasets/images").read() == b"precious"
    assert kept in storage.list_ids()


def test_next_run_finishes_a_removal(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    kept, deleted = write(storage), write(storage)
    code = """
import os, shutil, signal, sys
from det_lightning.checkpoint import CheckpointStorage
sys.addaudithook(lambda event, _: event == "os.remove" and os.kill(os.getpid(), signal.SIGKILL))
CheckpointStorage(sys.argv[1]).delete(sys.argv[2])
"""
    command = [start_warm_python().executable, "-c", code, str(tmp_path), deleted]
    assert subprocess.run(command, env=environment()).returncode == -9
    assert storage.list_ids(complete=False) == [kept]
    assert not (tmp_path / deleted).exists()
    assert (tmp_path / ".det_lightning/removed").exists()
    assert storage.remove_leftovers() == []
    assert [path.name for path in tmp_path.iterdir()] == [kept]


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="root may read everything")
def test_unreadable_directory_is_no_checkpoint(tmp_path: Path) -> None:
    kept = write(CheckpointStorage(tmp_path))
    (tmp_path / "lost+found").mkdir(mode=0)
    assert CheckpointStorage(tmp_path).list_ids() == [kept]


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    (tmp_path / ".det_lightning/removed").mkdir(parents=True)
    (tmp_path / ".det_lightning/removed" / new_id()).symlink_to(tmp_path)
    (tmp_path / "precious").write_text("precious")
    CheckpointStorage(tmp_path).remove_leftovers()
    assert (tmp_path / "precious").exists()


# Writers that were killed

WRITES = """
import os, signal, sys
from det_lightning.checkpoint import CheckpointStorage
from tests.checkpoint.storage.backends import files_of

def stop(directory):
    print(directory, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()

CheckpointStorage(sys.argv[1]).write(files_of(), report_written=stop)
"""


def start_writing(storage: str, how: str, **variables: str) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that writes a checkpoint, and is killed or waits in the middle; return the directory too."""
    command, pipe = [start_warm_python().executable, "-c", WRITES, storage, how], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment(**variables))
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.slow
def test_only_dead_leftovers_are_removed(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "storage")
    complete = write(storage)
    (live, kept), (dead, left) = (start_writing(storage.root.path, how) for how in ("waits", "killed"))
    with live, dead:
        assert dead.wait() == -9
        assert storage.list_ids() == [complete]
        assert storage.list_ids(complete=False) == sorted([complete, kept.name, left.name])
        assert storage.remove_leftovers() == [left.name]
        assert storage.remove_leftovers() == []
        assert storage.list_ids(complete=False) == sorted([complete, kept.name])
        live.communicate("go on\n")
    assert storage.list_ids() == sorted([complete, kept.name])
    assert storage.remove_leftovers() == []
    assert not (tmp_path / "storage/.det_lightning").exists()


@pytest.mark.slow
def test_only_dead_stagings_are_removed(flaky: Backend, staging: Path) -> None:
    variables = {"TMPDIR": str(staging)}
    (live, kept), (dead, left) = (start_writing("memory://x", how, **variables) for how in ("waits", "killed"))
    with live, dead:
        assert dead.wait() == -9
        assert left.is_dir()
        flaky.storage().remove_leftovers()
        assert [*staging.iterdir()] == [kept.parent]
        assert (kept / "state_dict.pth").is_file()
        live.communicate("go on\n")
        assert live.returncode == 0
    assert [*staging.iterdir()] == []


def test_other_temporary_directories_stay(flaky: Backend, staging: Path, tmp_path: Path) -> None:
    (staging / "det_lightning-notes").mkdir()
    (staging / "det_lightning-notes/file").write_text("precious")
    for folder in (tmp_path / "elsewhere", staging / "other"):
        folder.mkdir()
        (folder / STAGING_MARK).touch()
    (staging / "det_lightning-link").symlink_to(tmp_path / "elsewhere")
    (staging / "det_lightning-linked mark").mkdir()
    (staging / "det_lightning-linked mark" / STAGING_MARK).symlink_to(tmp_path / "elsewhere" / STAGING_MARK)
    before = sorted(os.fspath(path) for path in tmp_path.rglob("*"))
    flaky.storage().remove_leftovers()
    assert sorted(os.fspath(path) for path in tmp_path.rglob("*")) == before


# Keys that are both file and directory


@pytest.mark.slow
def test_checkpoint_whose_file_is_a_directory_is_refused(s3_options: dict[str, Any], tmp_path: Path) -> None:
    """As only an object store can hold it."""
    backend = backend_of("s3", tmp_path, s3_options)
    storage = backend.storage()
    odd, fine = write(storage), write(storage)
    fs, checkpoint = storage.root.fs, storage.root / odd
    for name in ("a", "a/b", "code/x", "code/x/y/z"):
        fs.pipe_file((checkpoint / name).path, b"content")
    with pytest.raises(errors.UnsafeCheckpointError, match=r"files with the names of directories: 'a'\. .*"):
        load_checkpoint(str(checkpoint), s3_options)
    assert storage.list_ids() == sorted([odd, fine])
    load_checkpoint(storage.find(fine), s3_options)
    storage.delete(odd)
    assert storage.list_ids() == [fine]


def test_unfinished_file_of_another_process_stays(tmp_path: Path) -> None:
    """Containers that share a directory often have the same process ids."""
    theirs = tmp_path / f".file.{os.getpid()}.tmp"
    theirs.write_text("theirs")
    write_whole(tmp_path / "file", b"mine")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "mine", theirs.name: "theirs"}


# Beside a run, which does not wait for it


def test_run_does_not_wait_for_cleaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers = {leave_incomplete(tmp_path, "code/leftover.py").name for _ in range(3)}
    trained, remove, seen = threading.Event(), shutil.rmtree, list[tuple[str, set[str]]]()

    def hold(directory: Path) -> None:
        seen.append((threading.current_thread().name, leftovers & {path.name for path in tmp_path.iterdir()}))
        assert trained.wait(20), "the run waits for cleaning"
        remove(directory)

    class Trial(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            trained.set()
            return super().train_batch(batch, epoch_idx, batch_idx)

    monkeypatch.setattr(shutil, "rmtree", hold)
    fit_trial(Trial, max_length=pytorch.Batch(1), checkpoint_storage=tmp_path)
    for thread in [thread for thread in threading.enumerate() if thread.name == "det_lightning-cleaning"]:
        thread.join()
    # All are renamed before the first is removed.
    assert seen == [("det_lightning-cleaning", set())] * 3
    assert [path.name for path in tmp_path.iterdir()] == CheckpointStorage(tmp_path).list_ids()


def test_failed_cleaning_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".det_lightning").symlink_to(tmp_path)
    clean(CheckpointStorage(tmp_path))
    assert f"What killed runs left in {tmp_path} cannot be removed" in caplog.text
