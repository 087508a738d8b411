"""What holds for a storage of any kind: a directory, a URL of one, memory, an S3 bucket, an SFTP server."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from det_lightning import errors
from det_lightning.checkpoint import TrialState, load_checkpoint, open_checkpoint, read_checkpoint
from det_lightning.checkpoint.format.layout import METADATA_FILE
from det_lightning.files.strict_json import MAX_SMALL_FILE_BYTES
from tests.checkpoint.made_checkpoints import assert_equal
from tests.checkpoint.storage.backends import RESUME, STATE, Backend, all_paths, backend_of, write


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
