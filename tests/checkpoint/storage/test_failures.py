"""Failed transfers are reported with place and cause; no checkpoint is lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.checkpoint.retention.trial_checkpoints import add_metric
from det_lightning.checkpoint.storage.location import new_id
from tests.checkpoint.made_checkpoints import assert_equal
from tests.checkpoint.storage.backends import STATE, Backend, FlakyFileSystem, all_paths, backend_of, files_of, write
from tests.warm_python import start_warm_python

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["state_dict.pth", "metadata.json", ".det_lightning"])
def test_final_failure_keeps_a_copy(flaky: Backend, staging: Path, name: str) -> None:
    storage = flaky.storage()
    earlier = write(storage)
    FlakyFileSystem.fail(OSError("the storage is down"), only_named=name)
    with pytest.raises(errors.StorageError, match="the storage is down") as raised:
        write(storage)
    copy = Path(str(raised.value).partition("a complete copy is kept in ")[2].removesuffix("."))
    assert copy.is_relative_to(staging)
    storage.remove_leftovers()
    assert_equal(load_checkpoint(copy).state, STATE)
    assert storage.list_ids() == [earlier]
    assert FlakyFileSystem.failures == []
    assert_equal(load_checkpoint(storage.find(earlier)).state, STATE)


def test_metadata_are_never_torn_on_sftp(sftp_options: dict[str, Any], tmp_path: Path) -> None:
    storage = backend_of("sftp", tmp_path, sftp_options).storage()
    file = tmp_path / "storage" / write(storage) / "metadata.json"
    before = file.read_text()
    with file.open() as opened:
        assert add_metric(storage, file.parent.name, {"name": "loss", "value": 0.5})
        assert opened.read() == before, "the file was written over"
    assert json.loads(file.read_text())["metric"]["value"] == 0.5


@pytest.mark.parametrize("failure", [PermissionError("not yours"), ValueError("bad name")])
def test_error_names_the_place_and_the_cause(flaky: Backend, staging: Path, failure: Exception) -> None:
    FlakyFileSystem.fail(failure, only_named="state_dict.pth")
    said = f"Failed while writing flaky://storage.*{type(failure).__name__}: {failure}"
    with pytest.raises(errors.StorageError, match=said):
        write(flaky.storage())


def test_interrupt_is_passed_on_at_once(flaky: Backend, staging: Path) -> None:
    for failure in (KeyboardInterrupt(), SystemExit(1)):
        FlakyFileSystem.fail(failure, only_named="state_dict.pth")
        with pytest.raises(type(failure)):
            write(flaky.storage())
        assert [*staging.iterdir()] == []
        assert flaky.storage().list_ids() == []


@pytest.mark.parametrize("failed", ["load_data.json", "metadata.json", "resume.pth", "state_dict.pth"])
def test_interrupted_replacement_is_safe(flaky: Backend, failed: str) -> None:
    storage = flaky.storage()
    replaced, new = write(storage, 1), write(storage, 2)
    FlakyFileSystem.fail(KeyboardInterrupt(), only_named=failed)
    with pytest.raises(KeyboardInterrupt):
        storage.replace(replaced, by=new)
    assert storage.list_ids() == [new]
    assert_equal(load_checkpoint(storage.find(new)).state, STATE)


def test_mark_that_cannot_be_removed_is_warned_of(
    flaky: Backend, staging: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = flaky.storage()
    FlakyFileSystem.undeletable = ".det_lightning"
    checkpoint_id = write(storage)
    assert "is complete, but its mark cannot be removed: Failed while removing" in caplog.text
    FlakyFileSystem.undeletable = ""
    assert storage.list_ids() == [checkpoint_id]
    assert [*staging.iterdir()] == []


def test_require_writable_notices(s3_options: dict[str, Any], flaky: Backend) -> None:
    FlakyFileSystem.fail(PermissionError("read only"))
    with pytest.raises(errors.StorageError, match=r"Failed while trying to write .*read only"):
        flaky.storage().require_writable()
    with pytest.raises(errors.StorageError, match=r"Failed while trying to write to s3://no-such-bucket/.*bucket"):
        CheckpointStorage("s3://no-such-bucket/x", options=s3_options).require_writable()
    without_keys = {"endpoint_url": s3_options["endpoint_url"]}
    with pytest.raises(errors.StorageError, match="NoCredentialsError: Unable to locate credentials"):
        CheckpointStorage("s3://bucket/x", options=without_keys).require_writable()
    assert all_paths(flaky.storage()) == []


def test_missing_bucket_is_empty(s3_options: dict[str, Any]) -> None:
    storage = CheckpointStorage("s3://no-such-bucket/x", options=s3_options)
    assert storage.list_ids() == []
    assert storage.newest() is None
    with pytest.raises(errors.StorageError, match=r"Failed while reading s3://no-such-bucket/x/id: .*bucket"):
        load_checkpoint("s3://no-such-bucket/x/id", s3_options)


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000 + "file"], ids=len)
def test_too_long_name_is_an_error(flaky: Backend, name: str) -> None:
    storage = flaky.storage()
    location = storage.root / write(storage)
    location.fs.pipe_file(f"{location.path}/{name}", b"content")
    with pytest.raises(errors.StorageError, match=r"(File name too long|RecursionError)"):
        load_checkpoint(location.url)


SFTP = "sftp://host/x"
EXTRAS = {"s3://b": "s3", "s3a://b": "s3", "gs://b": "gcs", "gcs://b": "gcs", "az://b": "azure", "abfs://b": "azure"}


@pytest.mark.slow
def test_missing_library_names_the_extra() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["s3fs", "gcsfs", "adlfs", "paramiko"]))
from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage
for url in {[*EXTRAS, SFTP]}:
    try:
        CheckpointStorage(url)
    except errors.StorageError as e:
        print(e)
"""
    advice = {**{url: f"pip install -e '.[{extra}]' in a clone" for url, extra in EXTRAS.items()}, SFTP: "paramiko"}
    for printed, (url, advised) in zip(run(code, warm=False).splitlines(), advice.items(), strict=True):
        assert printed.startswith(f"{url} needs a library that is not installed: ")
        assert advised in printed


# Disks

FILLS = """
import dataclasses, json, resource, signal, sys
from pathlib import Path
import torch
from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from tests.checkpoint.storage.backends import files_of

root, what, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
Path("code").mkdir()
storage = CheckpointStorage(root)
earlier = storage.write(files_of(), code="code")
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
files = files_of()
large = {"models_state_dict": [{"weight": torch.ones(3_000_000)}]}
if what == "code":
    for name in "abc":
        with Path("code", name).open("wb") as file:
            file.truncate(12_000_000)
elif what == "load_data":
    files = dataclasses.replace(files, load_data={"text": "x" * 12_000_000})
elif what == "state":
    files = dataclasses.replace(files, state=large)

def report_written(directory):
    if what == "callback":
        (directory / "added").write_bytes(b"x" * 12_000_000)

try:
    storage.write(files, code="code", report_written=report_written)
    error = None
except Exception as e:
    error = [type(e).__name__, str(e)]
left = sorted(path.name for path in root.iterdir())
load_checkpoint(root / earlier)
print(json.dumps({"error": error, "left": left, "earlier": earlier}))
"""


def run(code: str, *arguments: str, before: tuple[str, ...] = (), warm: bool = True) -> str:
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
    command = [*before, start_warm_python().executable if warm else sys.executable, "-c", code, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    return process.stdout


def fill(what: str, limit: int, root: Path, before: tuple[str, ...] = ()) -> tuple[str, str]:
    """Write a checkpoint that is too large into a storage; return the type of the error and its message."""
    # A warm process would not be on the small disk.
    printed = json.loads(run(FILLS, str(root), what, str(limit), before=before, warm=not before))
    assert printed["left"] == [printed["earlier"]]
    kind, message = printed["error"]
    return kind, message


@pytest.mark.slow
@pytest.mark.parametrize("what", ["state", "load_data"])
def test_file_size_limit_loses_nothing(what: str, tmp_path: Path) -> None:
    kind, message = fill(what, 1_000_000, tmp_path)
    assert kind == "CheckpointError"
    said = r"Checkpoint .* cannot be written: .*(File too large|torch\.save\(\) could not write all)"
    assert re.search(said, message)


ON_SMALL_DISK = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=8m none "$0" && shift 0 && exec "$@"')


@pytest.mark.slow
@pytest.mark.parametrize("what", ["state", "load_data", "code", "callback"])
def test_full_disk_loses_nothing(what: str, tmp_path: Path) -> None:
    if (
        not shutil.which("unshare")
        or subprocess.run([*ON_SMALL_DISK, tmp_path, "true"], capture_output=True).returncode
    ):
        pytest.skip("NOT TESTED: a full disk. This machine lets no process mount a small file system of its own.")
    kind, message = fill(what, 0, tmp_path, before=(*ON_SMALL_DISK, str(tmp_path)))
    if what == "callback":
        assert kind == "OSError"
        assert "No space left on device" in message
    else:
        assert kind == "CheckpointError"
        assert re.search(r"No space left on device|torch\.save\(\) could not write all of a file", message)
        assert len(message) < 600


def test_failed_cleanup_names_the_disk(tmp_path: Path) -> None:
    def put_a_file_in_the_way(_: Path) -> None:
        (tmp_path / ".det_lightning").rename(tmp_path / "moved")
        (tmp_path / ".det_lightning").write_text("in the way")

    with pytest.raises(errors.CheckpointError, match=r"cannot be written: .*Not a directory"):
        CheckpointStorage(tmp_path).write(files_of(), report_written=put_a_file_in_the_way)


def test_existing_checkpoint_stays(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    taken = write(storage)
    before = all_paths(storage)
    with pytest.raises(errors.CheckpointError, match="No checkpoint can be written"):
        storage.write(files_of(), taken)
    assert all_paths(storage) == before
    assert storage.remove_leftovers() == []
    load_checkpoint(tmp_path / taken)


def test_foreign_mark_does_not_stop_a_run() -> None:
    code = """
import os, sys
from det_lightning.checkpoint import CheckpointStorage
storage = CheckpointStorage(sys.argv[1])
if os.getuid() == 0:  # who may do anything
    os.setuid(65534)
print(storage.remove_leftovers())
"""
    theirs = new_id()
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder, ".det_lightning/staging")
        marks.mkdir(parents=True)
        (marks / f"{theirs}.lock").touch()
        Path(folder, theirs).mkdir()
        (marks / f"{theirs}.lock").chmod(0o444)
        Path(folder).chmod(0o755)
        assert run(code, folder) == "[]\n"
        assert Path(folder, theirs).is_dir()
