"""Checkpoint directories: written whole or not at all, read without running what they carry."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import core, errors, pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import (
    CheckpointContent,
    CheckpointStorage,
    TrialState,
    load_checkpoint,
    open_checkpoint,
    read_checkpoint,
)
from det_lightning.checkpoint.format.layout import find_damage, read_json
from det_lightning.checkpoint.safe_load import verify_checkpoint
from tests.checkpoint import made_checkpoints
from tests.checkpoint.made_checkpoints import LOAD_DATA, forget_checksums, make_files, write_checkpoint
from tests.trials import fit_trial

PICKLES = ["state_dict.pth", "resume.pth", "trial_state.pkl"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path)


def test_checkpoint_has_determineds_files(checkpoint: Path) -> None:
    names = ["code", "load_data.json", "metadata.json", *PICKLES]
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(names)
    assert pickle.loads((checkpoint / "trial_state.pkl").read_bytes()) == vars(make_files().trial_state)
    assert read_json(checkpoint / "load_data.json") == LOAD_DATA
    expected = {"determined_version": "0.38.1", "steps_completed": 7, "format": "pickle"}
    expected["framework"] = f"torch-{torch.__version__}"
    assert read_json(checkpoint / "metadata.json").items() >= expected.items()


@pytest.mark.parametrize("known", [None, {}, {"trial_cls_spec": "m:T"}])
def test_unknown_settings_are_null(known: dict[str, Any] | None, tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    checkpoint = tmp_path / storage.write(CheckpointContent({}, TrialState(), known))
    content = read_checkpoint(checkpoint)
    assert content.trial_class == (known or {}).get("trial_cls_spec")
    assert content.load_data is not None
    assert content.load_data["hparams"] is content.load_data["experiment_config"] is None


def test_metadata_is_written_last(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)

    def look(directory: Path) -> None:
        assert directory.parent == tmp_path
        assert not (directory / "metadata.json").exists()
        assert all((directory / name).exists() for name in [*PICKLES, "load_data.json", "code"])
        assert storage.list_ids() == []
        (directory / "added by a callback").write_text("belongs to it")

    checkpoint_id = storage.write(make_files(), report_written=look)
    assert storage.list_ids() == [checkpoint_id]
    assert (tmp_path / checkpoint_id / "added by a callback").exists()
    assert "added by a callback" in read_json(tmp_path / checkpoint_id / "metadata.json")["files"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left"), KeyboardInterrupt(), errors.InvalidHP("no")])
def test_failure_removes_the_incomplete(checkpoint: Path, failure: BaseException) -> None:
    storage = CheckpointStorage(checkpoint.parent)

    def fail(directory: Path) -> None:
        raise failure

    with pytest.raises(type(failure)):
        storage.write(make_files(), report_written=fail)
    assert [path.name for path in checkpoint.parent.iterdir()] == storage.list_ids() == [checkpoint.name]
    read_checkpoint(checkpoint)


def test_impossible_storage_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(errors.CheckpointError, match=f"No checkpoint can be written in {tmp_path}/file/storage"):
        write_checkpoint(tmp_path / "file" / "storage")


# Reading what others wrote


class RunsCode:
    """Writes a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.sentinel)!r}, 'w').close()",)


@pytest.mark.parametrize("old", [False, True], ids=["", "old format"])
@pytest.mark.parametrize("name", PICKLES)
def test_code_runs_only_if_trusted(checkpoint: Path, name: str, old: bool) -> None:
    sentinel = Path.cwd() / "the code ran"
    forget_checksums(checkpoint)
    needed = dict(vars(made_checkpoints.make_resume())) if name == "resume.pth" else {}
    content = {**needed, "trial_id": RunsCode(sentinel)}
    if name == "trial_state.pkl":
        (checkpoint / name).write_bytes(pickle.dumps(content, 2 if old else None))
    else:
        torch.save(content, checkpoint / name, _use_new_zipfile_serialization=not old)
    with pytest.raises(errors.UnsafeCheckpointError, match=r"exec.* could run code.*trusted=True") as raised:
        read_checkpoint(checkpoint)
    assert str(checkpoint / name) in str(raised.value)
    (problem,) = verify_checkpoint(checkpoint).problems
    assert str(checkpoint / name) in problem
    assert not sentinel.exists()
    read_checkpoint(checkpoint, trusted=True)
    assert sentinel.exists()


def test_checksums_are_those_of_other_libraries(tmp_path: Path) -> None:
    (tmp_path / "digits").write_bytes(b"123456789")
    listed = {"digits": {"bytes": 9, "crc32c": "e3069283"}}  # google_crc32c gave both
    (tmp_path / "metadata.json").write_text(json.dumps({"files": listed, "metadata_crc32c": "ddee988b"}))
    assert find_damage(tmp_path) == []
    (tmp_path / "digits").write_bytes(b"123456780")
    (damage,) = find_damage(tmp_path)
    assert damage.startswith("digits has the checksum ")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "all but one byte": lambda content: content[:-1],
    "zeros": lambda content: b"\0" * len(content),
    "backwards": lambda content: content[::-1],
    "a web page": lambda content: b"<html>404</html>",
}


@pytest.mark.parametrize("name", [*PICKLES, "load_data.json"])
def test_damaged_file_is_named(checkpoint: Path, name: str) -> None:
    forget_checksums(checkpoint)
    path = checkpoint / name
    content = path.read_bytes()
    for kind, damage in DAMAGES.items():
        path.write_bytes(damage(content))
        with pytest.raises(errors.CheckpointError) as raised:
            read_checkpoint(checkpoint)
        assert str(path) in str(raised.value), kind
        assert any(str(path) in problem for problem in verify_checkpoint(checkpoint).problems)


def test_file_without_a_dict_is_refused(checkpoint: Path) -> None:
    forget_checksums(checkpoint)
    for name in ("state_dict.pth", "resume.pth"):
        good = (checkpoint / name).read_bytes()
        for content in ([1, 2], torch.ones(2), None):
            torch.save(content, checkpoint / name)
            with pytest.raises(errors.IncompleteCheckpointError, match=rf"{name} must hold a dict; got a \w+"):
                read_checkpoint(checkpoint)
        (checkpoint / name).write_bytes(good)
    for other in ([1], {"unknown": 1}, None, "text"):
        (checkpoint / "trial_state.pkl").write_bytes(pickle.dumps(other))
        with pytest.raises(errors.IncompleteCheckpointError, match=r"trial_state\.pkl"):
            read_checkpoint(checkpoint)


def test_needed_missing_parts_are_named(checkpoint: Path) -> None:
    forget_checksums(checkpoint)
    (checkpoint / "resume.pth").unlink()
    assert read_checkpoint(checkpoint).resume is None, "Determined writes none"
    for name in ("metadata.json", "state_dict.pth"):
        aside = (checkpoint / name).rename(checkpoint / "aside")
        message = f"{checkpoint}.* incomplete checkpoint: {name} is miss"
        with pytest.raises(errors.IncompleteCheckpointError, match=message):
            read_checkpoint(checkpoint)
        aside.rename(checkpoint / name)
    for directory in (checkpoint.parent, checkpoint.parent / "missing"):
        with pytest.raises(errors.CheckpointNotFound, match=str(directory)):
            read_checkpoint(directory)


# Values in place of a storage or a checkpoint: the error says what is expected, and what to give instead


def open_briefly(checkpoint: Any) -> None:
    with open_checkpoint(checkpoint):
        pass


TAKE_A_STORAGE: list[Callable[[Any], Any]] = [
    *(CheckpointStorage, DeterminedCheckpoint),
    lambda storage: core.init(checkpoint_storage=storage),
    lambda storage: fit_trial(checkpoint_storage=storage),
]


@pytest.mark.parametrize("take", TAKE_A_STORAGE)
def test_wrong_storage_is_named(take: Callable[[Any], Any]) -> None:
    for value in (7, True, b"bytes", ["a", "b"]):
        message = rf"checkpoint_storage must be a directory, a URL such as s3://.*; got {type(value).__name__}"
        with pytest.raises(TypeError, match=message):
            take(value)


TAKE_A_CHECKPOINT: list[Callable[[Any], Any]] = [
    *(pytorch.load_trial_from_checkpoint_path, load_checkpoint, read_checkpoint, open_briefly),
    CheckpointStorage("storage").find,
]


@pytest.mark.parametrize("take", TAKE_A_CHECKPOINT)
def test_wrong_checkpoint_is_named(take: Callable[[Any], Any]) -> None:
    for value in (None, CheckpointStorage("storage"), 7):
        with pytest.raises(TypeError, match="A checkpoint must be named by its id, path or URL; got "):
            take(value)


@pytest.mark.parametrize("take", [take for take in TAKE_A_CHECKPOINT if take is not read_checkpoint])
def test_storage_in_place_of_a_checkpoint_is_named(take: Callable[[Any], Any]) -> None:
    checkpoint = write_checkpoint("experiments/digits-1/checkpoints").absolute()
    message = f"is a directory of checkpoints, not a checkpoint: .* such as {checkpoint}"
    with pytest.raises(errors.CheckpointNotFound, match=message):
        take(str(checkpoint.parent))


def test_wrong_url_downloads_nothing() -> None:
    local = write_checkpoint("local")
    storage = CheckpointStorage("memory://downloads")
    for file in local.rglob("*.*"):
        (storage.root / "a-checkpoint" / file.name).write(file.read_bytes())
    downloaded: dict[str, int] = {}
    refused = pytest.raises(errors.CheckpointNotFound, match="such as memory://downloads/a-checkpoint")
    with refused, open_checkpoint("memory://downloads", progress=downloaded.__setitem__):
        pass
    storage.root.remove()
    assert downloaded == {}
    assert read_checkpoint(str(local)).trial_state.batches_trained == 7  # type: ignore[arg-type]


def test_wrong_latest_checkpoint_is_named() -> None:
    for name in ("latest", "newest", "Last", "11111111-2222-3333-4444-555555555555"):
        with pytest.raises(errors.CheckpointNotFound, match=f"='{name}'.* latest_checkpoint='last' resumes"):
            fit_trial(checkpoint_storage="storage", latest_checkpoint=name)
    for value in (7, True, ["a"]):
        with pytest.raises(TypeError, match=r"latest_checkpoint= takes the id, path or URL .* or 'last'; got "):
            fit_trial(checkpoint_storage="storage", latest_checkpoint=value)
