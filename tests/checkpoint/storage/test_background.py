"""Checkpoints that are written while the training goes on hold the state of the moment in which they were asked for."""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState, load_checkpoint
from det_lightning.checkpoint.storage import writing
from det_lightning.checkpoint.storage.location import Location
from det_lightning.checkpoint.storage.staging import open_staging
from det_lightning.checkpoint.storage.writing import CheckpointQueue, StateCopier
from tests.checkpoint import made_checkpoints
from tests.checkpoint.made_checkpoints import assert_equal
from tests.checkpoint.storage.backends import Backend, FlakyFileSystem, files_of, new_bucket, writing_threads
from tests.trials import SmallTrial, weights_of

# Snapshots


def change_everything(value: Any) -> None:
    """Change a nested state in place, as training does."""
    if isinstance(value, torch.Tensor):
        value.detach().fill_(1)
    elif isinstance(value, np.ndarray):
        value[...] = 1
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            change_everything(item)
    if isinstance(value, dict):
        value["added"] = 1
    elif isinstance(value, list):
        value.append("added")


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((2, 3), 7.5))


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3) + 2,
    "bfloat16": lambda: torch.full((3,), 2.5, dtype=torch.bfloat16),
    "bool": lambda: torch.tensor([False, False]),
    "complex": lambda: torch.tensor([2 + 3j]),
    "conj": lambda: torch.tensor([2 + 3j]).conj(),
    "view": lambda: torch.arange(100.0)[10:20],
    "transposed": lambda: (torch.arange(6.0).reshape(2, 3) + 2).t(),
    "strided": lambda: (torch.arange(9.0) + 2)[::3],
    "empty": lambda: torch.empty(0, 4),
    "part of nothing": lambda: torch.arange(4.0)[4:],
    "parameter": parameter,
    "requires_grad": lambda: torch.full((2,), 3.0, requires_grad=True),
    "array": lambda: np.arange(4) + 3,
    "array of objects": lambda: np.array([None, "x"], dtype=object),
    "random state": random.getstate,
    "numpy's random state": lambda: np.random.RandomState(3).get_state(),
    "torch's random state": lambda: torch.get_rng_state().clone(),
    "plain values": lambda: (3.5, "text", None),
    "modules": lambda: torch.nn.Linear(2, 2).state_dict(),
}


def test_snapshot_is_the_present_state() -> None:
    state = {kind: OrderedDict(one=[make()], other=(make(), {"more": make()})) for kind, make in KINDS.items()}
    expected, snapshot = copy.deepcopy(state), StateCopier().copy(state)
    assert_equal(snapshot, expected)
    change_everything(state)
    assert_equal(snapshot, expected)


def test_snapshot_keeps_type_and_attributes() -> None:
    assert StateCopier().copy(KINDS["transposed"]()).stride() == (1, 3)
    state = torch.nn.BatchNorm1d(2).state_dict()
    state["running_mean"].tag = "mine"
    snapshot = StateCopier().copy(state)
    assert snapshot._metadata == state._metadata  # type: ignore[attr-defined]
    assert vars(snapshot["running_mean"]) == {"tag": "mine"}


@pytest.mark.parametrize("make", [lambda: torch.zeros(4), lambda: torch.zeros(4, requires_grad=True), parameter])
def test_snapshot_keeps_shared_memory(make: Any) -> None:
    one = make()
    state = {"one": one, "again": one, "view": one.detach()[1:], "seen otherwise": [one.detach()]}
    snapshot = StateCopier().copy(state)
    assert snapshot["one"] is snapshot["again"]
    with torch.no_grad():
        snapshot["one"][1:] += 3
    assert torch.equal(snapshot["view"], snapshot["one"][1:])
    assert torch.equal(snapshot["seen otherwise"][0], snapshot["one"])
    assert not (one == snapshot["one"]).all()


Meter = dataclasses.make_dataclass("Meter", ["last"], slots=True)


@pytest.mark.parametrize("around", [lambda loss: deque([[loss]]), lambda loss: Namespace(meter=Meter(loss))])
def test_snapshot_copies_computed_tensors(around: Any) -> None:
    """deepcopy() refuses a tensor that was computed from parameters, such as a loss."""
    loss = parameter().sum()
    assert repr(StateCopier().copy(around(loss))) == repr(around(loss.detach().requires_grad_()))


def test_a_copy_reuses_the_memory_of_the_one_before() -> None:
    copier = StateCopier()
    addresses = {copier.copy([torch.full((4,), value)])[0].data_ptr() for value in (1.0, 2.0)}
    assert len(addresses) == 1


def test_snapshot_copies_overlapping_views() -> None:
    array = np.arange(8.0)
    state = [torch.from_numpy(array[:2]), torch.from_numpy(array)]
    for order in (state, state[::-1]):
        assert_equal(StateCopier().copy(order), [tensor.clone() for tensor in order])


# The queue


class Gate:
    """Stops a writer in the middle of a checkpoint until it is opened."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self.storage = storage
        self.open = threading.Event()
        self.entered: list[str] = []

    def stage(self, root: Location, checkpoint_id: str) -> Any:
        self.entered.append(checkpoint_id)
        assert self.open.wait(30)
        return open_staging(root, checkpoint_id)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(CheckpointStorage(tmp_path))
    monkeypatch.setattr(writing, "open_staging", gate.stage)
    yield gate
    gate.open.set()


def test_later_changes_are_not_written(gate: Gate) -> None:
    queue, weight = CheckpointQueue(gate.storage.root, in_background=True), torch.zeros(3)
    files = dataclasses.replace(files_of(1), state={"weight": weight})
    checkpoint_id = queue.write(files)
    assert queue.take_complete() == []
    weight += 1
    files.trial_state.batches_trained = 99
    files.load_data.clear()
    gate.open.set()
    assert queue.take_complete(wait=True) == [checkpoint_id]
    assert queue.take_complete(wait=True) == []
    content = load_checkpoint(gate.storage.find(checkpoint_id))
    assert torch.equal(content.state["weight"], torch.zeros(3))
    assert content.trial_state.batches_trained == 1
    assert writing_threads() == []


def test_at_most_one_is_under_way(gate: Gate) -> None:
    queue = CheckpointQueue(gate.storage.root, in_background=True)
    queue.write(files_of(1))
    second = threading.Thread(target=queue.write, args=[files_of(2)])
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second must wait for the first"
    assert len(gate.entered) == len(writing_threads()) == 1
    gate.open.set()
    second.join(30)
    assert len(queue.take_complete(wait=True)) == 2
    assert len(gate.storage.list_ids()) == 2


@pytest.mark.parametrize("boundary", ["settle", "save"])
def test_error_is_raised_once(boundary: str, flaky: Backend) -> None:
    queue = CheckpointQueue(flaky.storage().root, in_background=True)
    FlakyFileSystem.fail(PermissionError("read only"), only_named="state_dict")
    queue.write(files_of())
    while FlakyFileSystem.failures:
        pass
    with pytest.raises(errors.StorageError, match="read only"):
        if boundary == "save":
            queue.write(files_of())
        else:
            while queue.take_complete() == []:
                pass
    assert queue.take_complete(wait=True) == []
    assert writing_threads() == []
    queue.write(files_of())
    assert len(queue.take_complete(wait=True)) == 1


@pytest.mark.parametrize("in_background", [False, True])
def test_value_that_cannot_be_copied(tmp_path: Path, in_background: bool) -> None:
    queue = CheckpointQueue(CheckpointStorage(tmp_path).root, in_background=in_background)
    for value in (threading.Lock(), lambda: None):
        files = CheckpointContent({"value": value}, TrialState(), {}, None)
        with pytest.raises(errors.CheckpointError, match=r"cannot be written: .*(pickle|serialize|local object)"):
            queue.write(files)
            queue.take_complete(wait=True)
    assert [*tmp_path.iterdir()] == []
    assert writing_threads() == []


# Whole runs whose checkpoints go to a remote storage, or are written while the training goes on


LENGTH = 12


class Straight(NamedTuple):
    trial: SmallTrial
    storage: CheckpointStorage


class Recorder(pytorch.PyTorchCallback):
    """Records the checkpoints that it is called for, and adds a file to each."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.uploaded: list[str] = []

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.uploaded.append(uuid)

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self.written.append(Path(checkpoint_dir).name)
        (Path(checkpoint_dir) / "added").write_text("by the callback")


def train(
    storage: Any,
    recorder: Recorder | None = None,
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
        return Straight(train(storage, Recorder()), storage)


@pytest.mark.slow
def test_background_changes_nothing_else(tmp_path: Path, straight: Straight) -> None:
    storage, recorder = CheckpointStorage(tmp_path), Recorder()
    trial = train(storage, recorder, async_write=True)
    assert writing_threads() == []
    assert torch.equal(weights_of(trial), weights_of(straight.trial))
    assert_same_checkpoints(storage, straight.storage)
    assert sorted(recorder.uploaded) == storage.list_ids()
    assert recorder.written == recorder.uploaded
    assert [storage.info(name).metadata["steps_completed"] for name in recorder.uploaded] == [3, 6, 9, 12]


@pytest.mark.slow
def test_remote_equals_local(remote: Backend, straight: Straight) -> None:
    recorder = Recorder()
    trial = train(remote.storage(), recorder)
    assert torch.equal(weights_of(trial), weights_of(straight.trial))
    assert_same_checkpoints(remote.storage(), straight.storage)
    assert sorted(recorder.uploaded) == sorted(recorder.written) == remote.storage().list_ids()
    assert (remote.storage().root / recorder.written[0] / "added").read() == b"by the callback"
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
    storage, recorder = flaky.storage(), Recorder()
    FlakyFileSystem.fail(OSError("the storage is down"), only_named="state_dict")
    with pytest.raises(errors.StorageError, match=r"the storage is down.*a complete copy is kept in"):
        train(storage, recorder, period=period)
    assert recorder.uploaded == storage.list_ids() == []
    assert writing_threads() == []


def test_unwritable_storage_ends_the_run(flaky: Backend) -> None:
    FlakyFileSystem.fail(PermissionError("read only"))
    with pytest.raises(errors.StorageError, match="Failed while trying to write"):
        train(flaky.storage(), fail_at=0)


@pytest.mark.parametrize("fail_at", [3, 10])
def test_failing_trial_leaves_no_thread(remote: Backend, fail_at: int) -> None:
    recorder = Recorder()
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
