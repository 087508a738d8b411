"""Whole runs whose checkpoints go to a remote storage, or are written while the training goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from tests.checkpoint import made_checkpoints
from tests.checkpoint.made_checkpoints import assert_equal
from tests.checkpoint.storage.backends import Backend, FlakyFileSystem, new_bucket, writing_threads
from tests.trials import SmallTrial, weights_of

LENGTH = 12


class UploadRecorder(pytorch.PyTorchCallback):
    """Records the checkpoints that callbacks are called for."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.uploaded: list[str] = []

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.uploaded.append(uuid)


class WriteRecorder(UploadRecorder):
    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self.written.append(Path(checkpoint_dir).name)
        (Path(checkpoint_dir) / "added").write_text("by the callback")


def train(
    storage: Any,
    recorder: UploadRecorder | None = None,
    max_length: int = LENGTH,
    fail_at: int | None = None,
    latest_checkpoint: str | None = None,
    period: int = 3,
    **more: Any,
) -> SmallTrial:
    class Trial(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            if batch_idx == fail_at:
                raise RuntimeError("the trial failed")
            return super().train_batch(batch, epoch_idx, batch_idx)

    more["period"] = pytorch.Batch(period)
    return made_checkpoints.train(storage, max_length, latest_checkpoint, recorder, Trial, **more)


class Straight(NamedTuple):
    trial: SmallTrial
    storage: CheckpointStorage


def contents_of(storage: CheckpointStorage) -> dict[int, Any]:
    """Return what is in each checkpoint, by the number of batches."""
    contents = [load_checkpoint(storage.find(name), storage.options) for name in storage.list_ids()]
    return {content.trial_state.batches_trained: content for content in contents}


def assert_same_checkpoints(one: CheckpointStorage, other: CheckpointStorage) -> None:
    ours, theirs = contents_of(one), contents_of(other)
    assert ours.keys() == theirs.keys()
    for steps, content in ours.items():
        assert_equal(content.state, theirs[steps].state)
        assert_equal(content.resume, dataclasses.replace(theirs[steps].resume, trial=content.resume.trial))
        assert content.trial_state == theirs[steps].trial_state


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """A run into a local storage that nothing disturbs."""
    storage = CheckpointStorage(tmp_path_factory.mktemp("straight"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("code"))
        return Straight(train(storage, WriteRecorder()), storage)


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", [UploadRecorder, WriteRecorder])
def test_background_changes_nothing_else(
    tmp_path: Path, kind: type[UploadRecorder], in_background: bool, straight: Straight
) -> None:
    storage, recorder = CheckpointStorage(tmp_path), kind()
    trial = train(storage, recorder, async_write=in_background)
    assert writing_threads() == []
    assert torch.equal(weights_of(trial), weights_of(straight.trial))
    assert_same_checkpoints(storage, straight.storage)
    assert sorted(recorder.uploaded) == storage.list_ids()
    assert recorder.written == (recorder.uploaded if kind is WriteRecorder else [])
    assert [storage.info(name).metadata["steps_completed"] for name in recorder.uploaded] == [3, 6, 9, 12]


@pytest.mark.slow
def test_remote_equals_local(remote: Backend, straight: Straight) -> None:
    recorder = WriteRecorder()
    trial = train(remote.storage(), recorder)
    assert torch.equal(weights_of(trial), weights_of(straight.trial))
    assert_same_checkpoints(remote.storage(), straight.storage)
    assert sorted(recorder.uploaded) == sorted(recorder.written) == remote.storage().list_ids()
    assert writing_threads() == []


@pytest.mark.slow
def test_remote_resume_is_exact(remote: Backend, straight: Straight) -> None:
    storage = remote.storage()
    train(storage, max_length=7, period=LENGTH)
    (checkpoint_id,) = storage.list_ids()
    for latest in (f"{remote.url}/{checkpoint_id}", checkpoint_id, "last"):
        resumed = train(storage, latest_checkpoint=latest, seed=99)
        assert torch.equal(weights_of(resumed), weights_of(straight.trial))
        for mine, theirs in zip(resumed.context.optimizers, straight.trial.context.optimizers, strict=True):
            assert_equal(mine.state_dict(), theirs.state_dict())
        for written in {*storage.list_ids()} - {checkpoint_id}:
            storage.delete(written)


@pytest.mark.slow
def test_section_is_enough_to_train(s3_options: dict[str, Any], straight: Straight) -> None:
    keys = {"access_key": s3_options["key"], "secret_key": s3_options["secret"]}
    where = {"bucket": new_bucket("s3", s3_options), "prefix": "team", "endpoint_url": s3_options["endpoint_url"]}
    section = {"type": "s3", **where, **keys, "save_trial_best": 0, "save_trial_latest": 2}
    train(section, max_length=8, latest_checkpoint="last")
    resumed = train(section, latest_checkpoint="last", seed=99)
    assert torch.equal(weights_of(resumed), weights_of(straight.trial))
    assert sorted(contents_of(CheckpointStorage(section))) == [9, 12]


@pytest.mark.parametrize("period", [3, LENGTH])
def test_final_failure_ends_the_run(flaky: Backend, period: int) -> None:
    storage, recorder = flaky.storage(), UploadRecorder()
    FlakyFileSystem.fail(OSError("the storage is down"), only_named="state_dict")
    with pytest.raises(errors.StorageError, match=r"the storage is down.*a complete copy is kept in"):
        train(storage, recorder, period=period)
    assert recorder.uploaded == storage.list_ids() == []
    assert writing_threads() == []


def test_unwritable_storage_ends_the_run(flaky: Backend) -> None:
    FlakyFileSystem.fail(PermissionError("read only"))
    with pytest.raises(errors.StorageError, match="Failed while trying to write"):
        train(flaky.storage(), fail_at=0)


@pytest.mark.parametrize(("kind", "fail_at"), [(UploadRecorder, 4), (WriteRecorder, 3), (UploadRecorder, 10)])
def test_failing_trial_leaves_no_thread(remote: Backend, kind: type[UploadRecorder], fail_at: int) -> None:
    recorder = kind()
    with pytest.raises(RuntimeError, match="the trial failed"):
        train(remote.storage(), recorder, fail_at=fail_at)
    assert writing_threads() == []
    storage = remote.storage()
    assert set(recorder.uploaded) <= set(storage.list_ids()) == set(storage.list_ids(complete=False))
    assert sorted(contents_of(storage)) == [3, 6, 9][: fail_at // 3]


def test_trial_error_is_not_hidden(flaky: Backend, caplog: pytest.LogCaptureFixture) -> None:
    FlakyFileSystem.fail(OSError("the storage is down"), only_named="state_dict")
    with pytest.raises(RuntimeError, match="the trial failed"):
        train(flaky.storage(), fail_at=3)
    assert "and this checkpoint is lost" in caplog.text
    assert writing_threads() == []
