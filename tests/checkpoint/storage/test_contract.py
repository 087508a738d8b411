"""What holds for a storage of any kind: a directory, a URL of one, memory, an S3 bucket, an SFTP server."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from det_lightning import errors
from det_lightning.checkpoint import (
    CheckpointStorage,
    Retention,
    TrialState,
    load_checkpoint,
    open_checkpoint,
    read_checkpoint,
)
from det_lightning.checkpoint.format.layout import METADATA_FILE, with_checksum
from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
from det_lightning.checkpoint.storage.location import new_id
from det_lightning.files.strict_json import MAX_SMALL_FILE_BYTES
from tests.checkpoint.made_checkpoints import assert_equal
from tests.checkpoint.storage.backends import RESUME, STATE, Backend, all_paths, backend_of, new_bucket, write


def test_written_content_is_read_back(backend: Backend) -> None:
    storage = backend.storage()
    assert storage.list_ids() == []
    assert storage.newest() is None
    checkpoint_id = write(storage)
    assert storage.list_ids() == [checkpoint_id]
    url = f"{backend.url}/{checkpoint_id}"
    found = {storage.find(name) for name in (checkpoint_id, url, f"{url}/", storage.find(checkpoint_id))}
    assert found == {storage.newest()} == {str(storage.root / checkpoint_id)}
    for location in (url, *found):
        with open_checkpoint(location, backend.options) as directory:
            content = read_checkpoint(directory)
            assert directory.name == content.name == checkpoint_id
        assert_equal(content.state, STATE)
        assert_equal(content.resume, RESUME)
        assert content.trial_state == TrialState(batches_trained=7)


def test_downloaded_copy_is_removed(backend: Backend) -> None:
    Path("package").mkdir()
    Path("package/model[1].py").write_text("the code")
    storage = backend.storage()
    url = storage.find(write(storage))
    arrived: dict[str, int] = {}
    with open_checkpoint(url, backend.options, progress=arrived.__setitem__) as directory:
        assert (directory / "code/package/model[1].py").exists() == storage.is_local
        sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
    assert directory.exists() == storage.is_local
    assert arrived == ({} if storage.is_local else sizes)
    with open_checkpoint(url, backend.options, with_code=True) as directory:
        assert (directory / "code/package/model[1].py").read_text() == "the code"
    assert load_checkpoint(url, backend.options).source == f"{url}/state_dict.pth"


def test_file_times_order_checkpoints(backend: Backend) -> None:
    """As in checkpoints of Determined's."""
    storage = backend.storage()
    ids = []
    for steps in ("7", None):
        ids.append(write(storage))
        time.sleep(1.1 if backend.url.startswith(("s3", "sftp", "az")) else 0.02)  # their times are whole seconds
        (storage.root / ids[-1] / "metadata.json").write(json.dumps({"steps_completed": steps}).encode())
    assert storage.newest() == str(storage.root / ids[1])


def test_torn_checkpoint_is_told_apart(backend: Backend) -> None:
    storage = backend.storage()
    before = time.time() - 2  # some storages round
    complete, torn = write(storage, 3, {"time": 1.0}), write(storage, 4)
    (storage.root / torn / "metadata.json").remove()
    assert storage.list_ids() == [complete]
    assert storage.list_ids(complete=False) == sorted([complete, torn])
    assert storage.newest() == str(storage.root / complete)
    assert storage.remove_leftovers() == []  # Determined's own writers leave no mark
    assert storage.list_ids(complete=False) == sorted([complete, torn])
    with pytest.raises(errors.IncompleteCheckpointError, match=r"metadata\.json is missing"):
        load_checkpoint(storage.find(torn), backend.options)
    of_complete, of_torn, of_none = map(storage.info, (complete, torn, "unknown"))
    assert (of_complete.id, of_complete.complete, of_complete.metadata["steps_completed"]) == (complete, True, 3)
    location = storage.root / complete
    assert of_complete.size_bytes == sum(location.fs.size((location / name).path) for name in location.find_files())
    assert of_complete.written is not None
    assert before < of_complete.written < time.time() + 2
    assert (of_torn.complete, of_torn.metadata) == (False, {})
    assert (of_none.complete, of_none.size_bytes, of_none.written) == (False, 0, None)


@pytest.mark.parametrize("padding", [None, MAX_SMALL_FILE_BYTES], ids=["empty", "too large"])
def test_impossible_metadata_are_ignored(backend: Backend, padding: int | None, tmp_path: Path) -> None:
    storage = backend.storage()
    checkpoint_id = write(storage)
    file = storage.root.checkpoint(checkpoint_id) / METADATA_FILE
    changed = tmp_path / "changed"
    changed.write_bytes(b"" if padding is None else file.read() + b" " * padding)
    file.fs.put_file(str(changed), file.path)
    # Asked for without a listing, whose size anyone could have made up.
    assert storage.info(checkpoint_id).metadata == {}


def test_delete_removes_only_one(backend: Backend) -> None:
    storage = backend.storage()
    storage.require_writable()
    kept, deleted = write(storage), write(storage)
    assert {path.partition("/")[0] for path in all_paths(storage)} == {kept, deleted}
    storage.delete(deleted)
    assert {path.partition("/")[0] for path in all_paths(storage)} == {kept}
    load_checkpoint(storage.find(kept), backend.options)
    for name in (deleted, "", ".", "..", ".det_lightning", f"../storage/{kept}", "*"):
        with pytest.raises(errors.CheckpointNotFound):
            storage.delete(name)
    assert storage.list_ids() == [kept]


def test_replaced_checkpoint_is_gone(backend: Backend) -> None:
    storage = backend.storage("/a[1]")
    for steps in (1, 2):
        storage.replace(write(storage, 0), by=write(storage, steps))
    names = storage.list_ids()
    found = [load_checkpoint(storage.find(name), backend.options).trial_state.batches_trained for name in names]
    assert sorted(found) == [1, 2]
    assert {path.partition("/")[0] for path in all_paths(storage)} == {*names}


def test_unknown_id_names_similar_ids(backend: Backend) -> None:
    storage = backend.storage()
    with pytest.raises(errors.CheckpointNotFound, match=r"no checkpoint 'x', .* It holds no checkpoints"):
        storage.find("x")
    known = write(storage)
    for name in (known[:-2], f"{backend.url}/{known[:-2]}", f"{backend.url}/{known[:-2]}/"):
        with pytest.raises(errors.CheckpointNotFound, match=f"no checkpoint '{name}', .*Similar ids: {known}"):
            storage.find(name)
    with pytest.raises(errors.CheckpointNotFound, match="There is no checkpoint directory"):
        load_checkpoint(f"{backend.url}/{known[:-2]}", backend.options)


def test_prefixes_are_separate(backend: Backend) -> None:
    one, other = backend.storage("/run1"), backend.storage("/run10")
    of_one, of_other = write(one), write(other)
    assert (one.list_ids(), other.list_ids()) == ([of_one], [of_other])
    with pytest.raises(errors.CheckpointNotFound):
        one.find(of_other)
    one.delete(of_one)
    assert (one.list_ids(), other.list_ids()) == ([], [of_other])
    assert one.newest() is None
    assert backend.storage().list_ids() == []
    child = backend.storage().root / "index"
    (child / "index/a.json").write(b"{}")
    assert child.list_names() == ["index"], "the name of its parent"


def test_prefix_is_no_pattern(backend: Backend) -> None:
    storage, looks_alike = backend.storage("/run[1]"), backend.storage("/run1")
    kept = write(looks_alike)
    copied = looks_alike.root / kept
    checkpoint_id = write(storage)
    for name in copied.find_files():
        (storage.root / kept / name).write((copied / name).read())
    assert storage.list_ids() == sorted([checkpoint_id, kept])
    load_checkpoint(storage.find(checkpoint_id), backend.options)
    storage.delete(checkpoint_id)
    storage.delete(kept)
    assert storage.list_ids() == []
    assert looks_alike.list_ids() == [kept]
    load_checkpoint(looks_alike.find(kept), backend.options)


# What writers leave behind


@pytest.mark.parametrize("age_h", [1, 30])
def test_remote_leftovers_go_after_a_day(remote: Backend, age_h: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = remote.storage()
    complete, torn = write(storage), write(storage)
    (storage.root / torn / "metadata.json").remove()
    for name in (complete, torn):
        (storage.root / ".det_lightning/staging" / f"{name}.lock").write(b"")
    later = time.time() + 3600 * age_h
    monkeypatch.setattr(time, "time", lambda: later)
    assert storage.remove_leftovers() == ([torn] if age_h > 24 else [])
    assert storage.list_ids(complete=False) == sorted([complete, torn] if age_h < 24 else [complete])
    assert storage.list_ids() == [complete]
    assert (".det_lightning" in {path.partition("/")[0] for path in all_paths(storage)}) == (age_h < 24)


# What others wrote


def test_directory_objects_are_not_files(remote: Backend) -> None:
    """Determined, and the S3 console, make an empty object for each directory."""
    storage = remote.storage()
    checkpoint_id = write(storage)
    location = storage.root / checkpoint_id
    names = [*location.find_files()]
    if remote.url.startswith("s3"):
        for folder in ("code/", "code/package/", "extra/", ""):
            location.fs.pipe_file(f"{location.path}/{folder}", b"")
        location.fs.pipe_file(f"{storage.root.path}/", b"")
    (location / "extra/file").write(b"content")
    (location / "code/package/model.py").write(b"content")
    assert storage.list_ids() == [checkpoint_id]
    assert sorted(location.find_files()) == sorted([*names, "extra/file", "code/package/model.py"])
    with open_checkpoint(str(location), remote.options, with_code=True) as directory:
        assert (directory / "extra/file").read_bytes() == (directory / "code/package/model.py").read_bytes()
        read_checkpoint(directory)
    storage.delete(checkpoint_id)
    assert all_paths(storage) == []


@pytest.mark.parametrize("name", ["../../evil", "code/../../../evil", "/evil", "..", "a\\..\\evil"])
def test_names_that_lead_out_are_refused(
    s3_options: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage = backend_of("s3", tmp_path, s3_options).storage()
    location = storage.root / write(storage)
    location.fs.pipe_file(f"{location.path}/{name}", b"evil")
    refused = pytest.raises(errors.UnsafeCheckpointError, match=r"lead out of the checkpoint: (.*evil|'..')")
    with refused, open_checkpoint(str(location), s3_options, with_code=True):
        pass
    assert [*tmp_path.rglob("*")] == []


# How many requests it takes to know all checkpoints of a bucket, or the newest


@dataclasses.dataclass
class Bucket:
    """A bucket of the S3 server, which counts the requests that are made through ``storage``."""

    name: str
    storage: CheckpointStorage

    def put(self, key: str, content: bytes) -> None:
        """Store an object without a request."""
        from moto.s3.models import s3_backends

        s3_backends["123456789012"]["aws"].put_object(self.name, key, content)

    def put_checkpoint(self, steps: int, trial: str = "t", checkpoint_id: str = "", **notes: Any) -> str:
        checkpoint_id = checkpoint_id or new_id()
        metric = {"name": "loss", "value": 1.0 / (steps + 1), "smaller_is_better": True}
        notes = {"experiment": "e", "trial": trial, "metric": metric, "time": float(steps), **notes}
        metadata = {"steps_completed": steps, **notes, "files": {"state_dict.pth": {"bytes": 5, "crc32c": "0"}}}
        self.put(f"{checkpoint_id}/state_dict.pth", b"state")
        self.put(f"{checkpoint_id}/metadata.json", json.dumps(with_checksum(metadata)).encode())
        return checkpoint_id

    def write_one_a_minute(self, ids: list[str]) -> None:
        """Change the bucket's times as if one checkpoint a minute had been written."""
        from moto.s3.models import s3_backends

        minutes = {checkpoint_id: number for number, checkpoint_id in enumerate(ids)}
        for name, key in s3_backends["123456789012"]["aws"].buckets[self.name].keys.items():
            number = minutes[name.partition("/")[0]]
            key.last_modified = datetime.datetime(2026, 1, 1) + datetime.timedelta(minutes=number)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Yield a counter of the requests inside: by operation, and those of the checkpoints' metadata."""
        counted: Counter[str] = Counter()

        def count(request: Any, **_: Any) -> None:
            counted["all"] += 1
            counted["metadata"] += request.url.endswith("/metadata.json") and request.method == "GET"
            counted["list"] += "list-type=2" in request.url

        self.storage.root.exists()  # a client exists from the first request on
        events = self.storage.root.fs.s3.meta.events
        events.register("before-send.s3", count)
        try:
            yield counted
        finally:
            events.unregister("before-send.s3", count)


@pytest.fixture
def bucket(s3_options: dict[str, Any]) -> Bucket:
    name = new_bucket("s3", s3_options)
    return Bucket(name, CheckpointStorage(f"s3://{name}", options=s3_options))


def test_each_checkpoint_is_read_once(bucket: Bucket) -> None:
    ids = sorted(bucket.put_checkpoint(steps) for steps in range(60))
    with bucket.counting() as counted:
        found = bucket.storage.list_checkpoints()
        facts = [(info.id, info.notes.steps_completed, info.complete, info.size_bytes > 5) for info in found]
    assert [one[0] for one in facts] == ids
    assert sorted(one[1] or 0 for one in facts) == list(range(60))
    assert all(one[2:] == (True, True) for one in facts)
    assert counted == {"metadata": 60, "list": 1, "all": 61}


@pytest.mark.slow
def test_newest_of_1000_in_10_requests(bucket: Bucket) -> None:
    ids = [bucket.put_checkpoint(steps) for steps in range(1000)]
    bucket.write_one_a_minute(ids)
    with bucket.counting() as newest:
        assert bucket.storage.newest() == f"s3://{bucket.name}/{ids[-1]}"
    assert newest["all"] <= 10
    with bucket.counting() as listing:
        assert bucket.storage.list_ids() == sorted(ids)
    assert listing["all"] == listing["list"] <= 3


def test_metadata_written_again_is_not_newer(bucket: Bucket) -> None:
    """As by ``annotate``, or by a metric that comes later."""
    ids = [bucket.put_checkpoint(steps) for steps in range(50)]
    bucket.write_one_a_minute(ids)
    for rewritten in ids[:20]:
        bucket.put(f"{rewritten}/metadata.json", (bucket.storage.root / rewritten / "metadata.json").read())
    assert [*bucket.storage.newest_first()] == [f"s3://{bucket.name}/{one}" for one in reversed(ids)]


def test_newest_of_a_job_is_found_among_others(bucket: Bucket) -> None:
    own = bucket.put_checkpoint(1, job="mine")
    bucket.write_one_a_minute([own, *(bucket.put_checkpoint(steps, job="other") for steps in range(40))])
    assert [*bucket.storage.newest_first("mine")] == [f"s3://{bucket.name}/{own}"]


def test_pruning_reads_what_the_bucket_holds_and_removes_old_indexes(bucket: Bucket) -> None:
    ids = [bucket.put_checkpoint(steps) for steps in range(10)]
    bucket.put(".det_lightning/index/e/t.json", b"{}")
    bucket.put(".det_lightning/checkpoints.json", b"{}")
    best = {"name": "loss", "value": -1.0, "smaller_is_better": True}
    bucket.put_checkpoint(2, checkpoint_id=ids[2], metric=best)
    plan = plan_pruning(bucket.storage, Retention())
    assert carry_out(plan, bucket.storage) == plan.to_delete
    assert {name.partition("/")[0] for name in bucket.storage.root.find_files()} == {ids[2], ids[9]}
