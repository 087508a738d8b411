"""How many requests it takes to know all checkpoints of a bucket, or the newest."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from det_lightning.checkpoint import CheckpointStorage, Retention
from det_lightning.checkpoint.format.layout import with_checksum
from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
from det_lightning.checkpoint.storage.location import new_id
from tests.checkpoint.storage.backends import new_bucket


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
        """Put as many checkpoints; return their sorted ids."""
        return sorted(self.put_checkpoint(steps) for steps in range(count))

    def write_one_a_minute(self, ids: list[str]) -> None:
        """Change the bucket's times as if one checkpoint a minute had been written."""
        from moto.s3.models import s3_backends

        minutes = {checkpoint_id: number for number, checkpoint_id in enumerate(ids)}
        for name, key in s3_backends["123456789012"]["aws"].buckets[self.name].keys.items():
            number = minutes[name.partition("/")[0]]
            key.last_modified = datetime.datetime(2026, 1, 1) + datetime.timedelta(minutes=number)

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
    return Bucket(name, CheckpointStorage(f"s3://{name}", options=s3_options))


def test_each_checkpoint_is_read_once(bucket: Bucket) -> None:
    ids = bucket.fill(60)
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
        bucket.put(f"{rewritten}/metadata.json", bucket.read(f"{rewritten}/metadata.json"))
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
