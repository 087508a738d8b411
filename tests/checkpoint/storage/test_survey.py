"""How many requests it takes to know all checkpoints of a bucket, with and without its index."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage, Retention
from det_lightning.checkpoint.format.manifest import with_checksum
from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
from det_lightning.checkpoint.storage import survey
from det_lightning.checkpoint.storage.location import new_id
from det_lightning.checkpoint.storage.staging import announce
from tests.checkpoint.storage.backends import QUICK, new_bucket

INDEX = ".det_lightning/checkpoints.json"
PAGE = 1000


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

    def fill(self, count: int) -> list[str]:
        """Put as many checkpoints, and the directory that shows that this library writes into the bucket."""
        self.put(".det_lightning/index/e/note", b"")
        return sorted(self.put_checkpoint(steps) for steps in range(count))

    def surveyed(self) -> list[str]:
        """Put ten checkpoints and an index of them."""
        ids = self.fill(10)
        self.storage.survey()
        return ids

    def read(self, key: str) -> bytes:
        content: bytes = (self.storage.root / key).read()
        return content

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
    return Bucket(name, CheckpointStorage(f"s3://{name}", options=s3_options, retry=QUICK))


@pytest.mark.slow
def test_each_checkpoint_is_read_once(bucket: Bucket) -> None:
    ids = bucket.fill(60)
    with bucket.counting() as counted:
        before = bucket.storage.survey()
    assert [info.id for info in before] == ids
    assert counted["metadata"] == 60
    # All objects are on one page; the index is looked for, which may take two requests, and then written.
    assert counted["list"] <= 2
    assert counted["all"] <= 60 + 5
    with bucket.counting() as counted:
        after = bucket.storage.survey()
    assert counted["metadata"] == 0
    # The index, the bucket, the marks of writers; s3fs looks twice for what is missing.
    assert counted["all"] <= 5
    for info in before:
        del info.metadata["files"], info.metadata["metadata_crc32c"]
    assert after == [dataclasses.replace(info, markers=one.markers) for info, one in zip(before, after, strict=True)]


@pytest.mark.slow
def test_5000_checkpoints_in_20_requests(bucket: Bucket) -> None:
    ids = bucket.fill(5000)
    # Written as the first survey would write it, whose 5,000 reads would only take time here.
    entries: list[dict[str, Any]] = []
    for steps, one in enumerate(ids):
        metadata = {"steps_completed": steps, "experiment": "e", "trial": f"t{steps % 2}", "time": float(steps)}
        entries.append({"id": one, "metadata": metadata, "size_bytes": 500, "written": 1e9, "metadata_written": 1e9})
    bucket.put(INDEX, json.dumps(with_checksum({"version": 1, "checkpoints": entries})).encode())
    with bucket.counting() as listing:
        assert bucket.storage.list_ids() == ids
    with bucket.counting() as newest:
        assert bucket.storage.newest() == f"s3://{bucket.name}/{ids[-1]}"
    with bucket.counting() as retention:
        plan = plan_pruning(bucket.storage, Retention())
    assert sorted(plan.kept) == sorted(ids[-2:])
    assert len(plan.to_delete) == 4998
    for counted in (listing, newest, retention):
        assert counted["all"] <= 20
    assert listing["list"] == newest["list"] == 5000 // PAGE + 1 + 2


def test_unindexed_checkpoints_are_noticed(bucket: Bucket) -> None:
    ids = bucket.fill(20)
    bucket.storage.survey()
    for count, read_again in ((2, 2), (4, 0)):  # after so many the index is rewritten
        ids += [bucket.put_checkpoint(100 + len(ids) + number) for number in range(count)]
        assert bucket.storage.newest() == f"s3://{bucket.name}/{ids[-1]}"
        with bucket.counting() as counted:
            assert bucket.storage.list_ids() == sorted(ids)
        assert counted["metadata"] == read_again


def test_removed_checkpoints_are_noticed(bucket: Bucket) -> None:
    ids = bucket.surveyed()
    bucket.storage.root.fs.rm(f"{bucket.name}/{ids[3]}", recursive=True)
    assert bucket.storage.list_ids() == [*ids[:3], *ids[4:]]
    bucket.storage.delete(ids[0])
    assert bucket.storage.list_ids() == [*ids[1:3], *ids[4:]]


def test_damaged_index_is_rebuilt(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    ids = bucket.surveyed()
    good = bucket.read(INDEX)
    damaged = [b"", b"{", b"[]", b'{"version": 1, "checkpoints": []}']
    wrong = [{"written": 10**400}, {"metadata_written": -(10**400)}, {"size_bytes": 10**400}, {"size_bytes": -1}]
    for changes in wrong:
        content = json.loads(good)
        content["checkpoints"][0].update(changes)
        del content["metadata_crc32c"]
        # Whoever can write the index can write its checksum.
        damaged.append(json.dumps(with_checksum(content)).encode())
    for written in damaged:
        caplog.clear()
        bucket.put(INDEX, written)
        assert bucket.storage.list_ids() == ids
        assert "checkpoints.json is damaged" in caplog.text
        assert bucket.read(INDEX) == good
    bucket.put(INDEX, good.replace(b'"steps_completed": 3', b'"steps_completed": 9'))
    assert sorted(info.metadata["steps_completed"] for info in bucket.storage.survey()) == list(range(10))
    assert "its checksum differs" in caplog.text


def test_too_large_index(bucket: Bucket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO")
    ids = bucket.surveyed()
    content = bucket.read(INDEX)
    monkeypatch.setattr(survey, "_MAX_INDEX_BYTES", len(content) - 1)
    assert bucket.storage.list_ids() == ids
    limits = f"has {len(content):,} bytes; at most {len(content) - 1:,} are read"
    assert f"checkpoints.json {limits}). The checkpoints themselves are read." in caplog.text
    assert f"the next reader reads each checkpoint: it would have {len(content):,} bytes" in caplog.text


def test_rest_of_a_removal_is_incomplete(bucket: Bucket) -> None:
    ids = bucket.surveyed()
    # As far as a process gets that is killed in the middle of delete().
    announce(bucket.storage.root, ids[4], bucket.storage.retry)
    (bucket.storage.root / ids[4] / "metadata.json").remove()
    assert bucket.storage.list_ids() == [*ids[:4], *ids[5:]]
    assert bucket.storage.list_ids(complete=False) == ids


@pytest.mark.slow
def test_stale_index_deletes_nothing(bucket: Bucket) -> None:
    """Metrics that another program adds can change which checkpoints are the best."""
    ids = [bucket.put_checkpoint(steps) for steps in range(10)]
    bucket.put(".det_lightning/index/e/note", b"")
    bucket.storage.survey()
    best = {"name": "loss", "value": -1.0, "smaller_is_better": True}
    bucket.put_checkpoint(2, checkpoint_id=ids[2], metric=best)
    plan = plan_pruning(bucket.storage, Retention())
    assert ids[2] in plan.to_delete
    with pytest.raises(errors.StorageError, match="was out of date"):
        carry_out(plan, bucket.storage)
    plan = plan_pruning(bucket.storage, Retention())
    assert sorted(plan.kept) == sorted([ids[2], ids[9]])
    assert carry_out(plan, bucket.storage) == plan.to_delete
    assert bucket.storage.list_ids() == sorted([ids[2], ids[9]])


def test_foreign_bucket_gets_no_index(bucket: Bucket) -> None:
    ids = sorted(bucket.put_checkpoint(steps) for steps in range(10))
    assert bucket.storage.list_ids() == ids
    assert not (bucket.storage.root / INDEX).exists()


def test_reusable_name_is_not_indexed(bucket: Bucket) -> None:
    bucket.fill(10)
    bucket.put_checkpoint(50, checkpoint_id="last")
    bucket.storage.survey()
    bucket.put_checkpoint(60, checkpoint_id="last")
    assert {info.id: info.metadata["steps_completed"] for info in bucket.storage.survey()}["last"] == 60
