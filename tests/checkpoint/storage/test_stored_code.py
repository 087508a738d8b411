"""Code in object stores: what has not changed is copied there, and not uploaded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState, open_checkpoint
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.safe_load import verify_checkpoint
from tests.checkpoint.storage.backends import new_bucket

FILES = 40


@pytest.fixture
def storage(s3_options: dict[str, Any]) -> CheckpointStorage:
    return CheckpointStorage(f"s3://{new_bucket('s3', s3_options)}", options=s3_options)


@pytest.fixture
def counted(storage: CheckpointStorage) -> Iterator[Counter[str]]:
    """Count the requests for files of code by operation, and the bytes that are sent with them."""
    found: Counter[str] = Counter()

    def count(request: Any, **_: Any) -> None:
        if "/code/" in request.url:
            is_copy = "x-amz-copy-source" in request.headers
            found["copies" if is_copy else request.method] += 1
            found["bytes"] += int(request.headers.get("Content-Length", 0))

    storage.root.exists()  # a client exists from the first request on
    events = storage.root.fs.s3.meta.events
    events.register("before-send.s3", count)
    yield found
    events.unregister("before-send.s3", count)


@pytest.fixture(autouse=True)
def code_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the working directory hold files that were written long ago."""
    for number in range(FILES):
        Path(f"{number}.py").write_text("content")
    monkeypatch.setattr("det_lightning.checkpoint.format.code_copy._TICK_NS", -(10**18))


def write(storage: CheckpointStorage, code: CodeCopier) -> str:
    return storage.write(CheckpointContent({}, TrialState()), code=code)


@pytest.mark.slow
def test_store_copies_what_it_holds(storage: CheckpointStorage, counted: Counter[str]) -> None:
    code = CodeCopier()
    write(storage, code)
    assert counted["PUT"] == FILES
    counted.clear()
    Path("0.py").write_text("changed")
    second = write(storage, code)
    assert counted == {"copies": FILES - 1, "PUT": 1, "bytes": counted["bytes"]}
    assert counted["bytes"] < 100  # one file, and the frame of its checksum
    with open_checkpoint(str(storage.find(second)), storage.options, with_code=True) as directory:
        assert verify_checkpoint(directory).problems == []


@pytest.mark.slow
def test_code_of_a_deleted_checkpoint(storage: CheckpointStorage, counted: Counter[str]) -> None:
    code = CodeCopier()
    storage.delete(write(storage, code))
    counted.clear()
    second = write(storage, code)
    assert (counted["PUT"], counted["copies"]) == (FILES, 0)
    with open_checkpoint(storage.find(second), storage.options, with_code=True) as directory:
        assert verify_checkpoint(directory).problems == []


@pytest.mark.slow
def test_code_after_a_failed_checkpoint(storage: CheckpointStorage) -> None:
    code = CodeCopier()
    write(storage, code)
    Path("0.py").write_text("changed")

    def fail(_: Path) -> None:
        raise OSError("a callback's file cannot be written")

    with pytest.raises(OSError, match="a callback's file"):
        storage.write(CheckpointContent({}, TrialState()), code=code, report_written=fail)
    with open_checkpoint(str(storage.find(write(storage, code))), storage.options, with_code=True) as directory:
        assert (directory / "code" / "0.py").read_text() == "changed"
        assert verify_checkpoint(directory).problems == []
