"""Checkpoint directories: written whole or not at all, read without running what they carry."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning import errors
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState, read_checkpoint
from det_lightning.checkpoint.format.layout import read_json
from det_lightning.checkpoint.format.manifest import find_damage
from tests.checkpoint.made_checkpoints import make_resume

STATE: dict[str, Any] = {
    "models_state_dict": [{"weight": torch.arange(3.0), "half": torch.ones(2, dtype=torch.bfloat16)}],
    "callbacks": {"mine": {"count": 3, "name": "x", "nested": [(1, 2.5, None)], "array": np.arange(4)}},
    "scalar": np.float64(0.25),
}
RESUME = dataclasses.replace(make_resume(), precision={"array": np.ones(2)})
TRIAL_STATE = TrialState(batches_trained=7, epochs_trained=2, last_val=5)
LOAD_DATA = {"trial_cls_spec": "m:T", "hparams": {"lr": 0.1}, "experiment_config": None, "is_trainer": True}
PICKLES = ["state_dict.pth", "resume.pth", "trial_state.pkl"]


def files_of(state: dict[str, Any] = STATE) -> CheckpointContent:
    return CheckpointContent(state, TRIAL_STATE, {**LOAD_DATA, "path": Path("p")}, RESUME)


def write(root: Path, state: dict[str, Any] = STATE, code_dir: Path | None = None) -> Path:
    return root / CheckpointStorage(root).write(files_of(state), code=code_dir)


def forget_checksums(checkpoint: Path) -> None:
    """Leave ``metadata.json`` as Determined writes it, so that a changed file is looked into."""
    metadata = read_json(checkpoint / "metadata.json")
    del metadata["files"], metadata["metadata_crc32c"]
    (checkpoint / "metadata.json").write_text(json.dumps(metadata))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path)


def test_what_was_written_is_read_back(checkpoint: Path) -> None:
    content = read_checkpoint(checkpoint)
    assert content.directory == checkpoint
    assert content.trial_state == TRIAL_STATE
    (model,) = content.state["models_state_dict"]
    assert torch.equal(model["weight"], torch.arange(3.0))
    assert model["half"].dtype == torch.bfloat16
    mine = content.state["callbacks"]["mine"]
    assert (mine["count"], mine["name"], mine["nested"]) == (3, "x", [(1, 2.5, None)])
    assert np.array_equal(mine["array"], np.arange(4))
    assert (content.state["scalar"], type(content.state["scalar"])) == (0.25, np.float64)
    assert content.resume is not None
    assert np.array_equal(content.resume.precision["array"], np.ones(2))


def test_layout_of_determined(checkpoint: Path) -> None:
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(
        ["code", "load_data.json", "metadata.json", *PICKLES]
    )
    assert pickle.loads((checkpoint / "trial_state.pkl").read_bytes()) == vars(TRIAL_STATE)
    assert read_json(checkpoint / "load_data.json") == {"trial_type": "PyTorchTrial", **LOAD_DATA}
    metadata = read_json(checkpoint / "metadata.json")
    assert (
        metadata.items()
        >= {
            "determined_version": "0.38.1",
            "steps_completed": 7,
            "framework": f"torch-{torch.__version__}",
            "format": "pickle",
        }.items()
    )


@pytest.mark.parametrize("known", [None, {}, {"trial_cls_spec": "m:T"}])
def test_unknown_settings_are_null(known: dict[str, Any] | None, tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    checkpoint = tmp_path / storage.write(CheckpointContent(STATE, TRIAL_STATE, known))
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

    checkpoint_id = storage.write(files_of(), report_written=look)
    assert storage.list_ids() == [checkpoint_id]
    assert (tmp_path / checkpoint_id / "added by a callback").exists()
    assert "added by a callback" in read_json(tmp_path / checkpoint_id / "metadata.json")["files"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left"), KeyboardInterrupt(), errors.InvalidHP("no")])
def test_failure_removes_the_incomplete(checkpoint: Path, failure: BaseException) -> None:
    storage = CheckpointStorage(checkpoint.parent)

    def fail(directory: Path) -> None:
        raise failure

    with pytest.raises(type(failure)):
        storage.write(files_of(), report_written=fail)
    assert [path.name for path in checkpoint.parent.iterdir()] == storage.list_ids() == [checkpoint.name]
    read_checkpoint(checkpoint)


def test_value_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointError, match="cannot be written"):
        write(tmp_path, {"callbacks": {"mine": lambda: None}})
    assert list(tmp_path.iterdir()) == []


def test_impossible_storage_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(errors.CheckpointError, match=f"No checkpoint can be written in {tmp_path}/file/storage"):
        write(tmp_path / "file" / "storage")


# Reading what others wrote


class RunsCode:
    """Writes a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.sentinel)!r}, 'w').close()",)


def save_old_format(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def save_pickle(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("state_dict.pth", torch.save),
        ("state_dict.pth", save_old_format),
        ("resume.pth", torch.save),
        ("trial_state.pkl", save_pickle),
    ],
)
def test_code_runs_only_if_trusted(checkpoint: Path, name: str, save: Callable[[Any, Path], None]) -> None:
    sentinel = Path.cwd() / "the code ran"
    forget_checksums(checkpoint)
    needed = RESUME.to_dict() if name == "resume.pth" else {}
    save({**needed, "trial_id": RunsCode(sentinel)}, checkpoint / name)
    with pytest.raises(errors.UnsafeCheckpointError, match=r"exec.* could run code.*trusted=True") as raised:
        read_checkpoint(checkpoint)
    assert str(checkpoint / name) in str(raised.value)
    assert not sentinel.exists()
    read_checkpoint(checkpoint, trusted=True)
    assert sentinel.exists()


def test_manifest_by_another_library(tmp_path: Path) -> None:
    (tmp_path / "digits").write_bytes(b"123456789")
    listed = {"digits": {"bytes": 9, "crc32c": "e3069283"}}  # google_crc32c gave both
    (tmp_path / "metadata.json").write_text(json.dumps({"files": listed, "metadata_crc32c": "ddee988b"}))
    assert find_damage(tmp_path) == []
    (tmp_path / "digits").write_bytes(b"123456780")
    (damage,) = find_damage(tmp_path)
    assert damage.startswith("digits has the checksum ")


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: b"\0" * len(content),
        lambda content: content[::-1],
        lambda content: b"<html>404</html>",
    ],
    ids=["empty", "one byte", "half", "all but one byte", "zeros", "backwards", "a web page"],
)
def test_damaged_file_is_named(checkpoint: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    forget_checksums(checkpoint)
    path = checkpoint / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(errors.CheckpointError) as raised:
        read_checkpoint(checkpoint)
    assert str(path) in str(raised.value)


@pytest.mark.slow
@settings(max_examples=60)
@given(name=st.sampled_from(PICKLES), share=st.floats(0, 1, exclude_max=True))
def test_cut_off_file_is_named(tmp_path_factory: pytest.TempPathFactory, name: str, share: float) -> None:
    checkpoint = write(tmp_path_factory.mktemp("cut"))
    forget_checksums(checkpoint)
    path = checkpoint / name
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(errors.IncompleteCheckpointError) as raised:
        read_checkpoint(checkpoint)
    assert str(path) in str(raised.value)


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data())
def test_damaged_trial_state(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    checkpoint = tmp_path_factory.getbasetemp() / "mutated"
    if not checkpoint.exists():
        write(checkpoint.parent / "written").rename(checkpoint)
        forget_checksums(checkpoint)
    path = checkpoint / "trial_state.pkl"
    original = path.read_bytes()
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content)))
        content[position : position + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        path.write_bytes(content)
        read_checkpoint(checkpoint)
    except errors.CheckpointError as error:
        assert str(path) in str(error)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("name", ["state_dict.pth", "resume.pth"])
@pytest.mark.parametrize("content", [[1, 2], torch.ones(2), None])
def test_file_without_a_dict_is_refused(checkpoint: Path, name: str, content: Any) -> None:
    forget_checksums(checkpoint)
    torch.save(content, checkpoint / name)
    with pytest.raises(errors.IncompleteCheckpointError, match=rf"{name} must hold a dict; got a \w+"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("content", [[1], {"unknown": 1}, None, "text"])
def test_trial_state_of_another_shape(checkpoint: Path, content: Any) -> None:
    forget_checksums(checkpoint)
    (checkpoint / "trial_state.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(errors.IncompleteCheckpointError, match=r"trial_state\.pkl"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_json_must_be_an_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "load_data.json").write_bytes(content)
    with pytest.raises(errors.IncompleteCheckpointError, match=r"load_data\.json"):
        read_json(tmp_path / "load_data.json")


@pytest.mark.parametrize("name", ["metadata.json", "state_dict.pth"])
def test_missing_file_is_incomplete(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match=f"{checkpoint}.* incomplete checkpoint: {name} is miss"):
        read_checkpoint(checkpoint)


def test_missing_or_incomplete(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(errors.CheckpointNotFound, match=str(directory)):
            read_checkpoint(directory)


def test_determined_has_no_resume_state(checkpoint: Path) -> None:
    forget_checksums(checkpoint)
    (checkpoint / "resume.pth").unlink()
    assert read_checkpoint(checkpoint).resume is None
