"""No file of a checkpoint is read through a link that leads out of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from det_lightning import core, errors
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.checkpoint.safe_load import inspect_checkpoint, verify_checkpoint
from det_lightning.pytorch import load_trial_from_checkpoint_path
from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.trials import SmallTrial


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "storage", by_determined=True)


@pytest.mark.parametrize("name", ["load_data.json", "state_dict.pth", "trial_state.pkl", "metadata.json"])
def test_link_that_leads_out_is_named(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / name).rename(tmp_path / name)
    (checkpoint / name).symlink_to(f"../../{name}")
    for read in (load_checkpoint, lambda path: load_trial_from_checkpoint_path(path, trial_class=SmallTrial)):
        with pytest.raises(errors.UnsafeCheckpointError) as raised:
            read(checkpoint)
        assert f"{checkpoint / name} is a link to {tmp_path / name}" in str(raised.value)
    (problem,) = verify_checkpoint(checkpoint).problems
    assert inspect_checkpoint(checkpoint) == {"problems": [problem]}
    assert problem == str(raised.value)
    known = CheckpointStorage(checkpoint.parent).info(checkpoint.name).metadata
    assert bool(known) == (name != "metadata.json")


def test_directory_behind_a_link_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (checkpoint / "state_dict.pth").rename(tmp_path / "elsewhere/state_dict.pth")
    (checkpoint / "determined").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.UnsafeCheckpointError, match="determined is a link to"):
        load_checkpoint(checkpoint)


def test_inner_links_are_followed(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "determined").mkdir()
    shutil.move(checkpoint / "state_dict.pth", checkpoint / "determined/weights")
    (checkpoint / "state_dict.pth").symlink_to("determined/weights")
    (checkpoint / "code/link.py").symlink_to("/etc/hosts")  # of code none is followed
    (tmp_path / "latest").symlink_to(checkpoint)
    for path in (checkpoint, tmp_path / "latest"):
        assert load_checkpoint(path).state
        assert verify_checkpoint(path).problems == []


def test_core_api_follows_no_link_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret").write_text("x")
    with core.init(checkpoint_storage=str(tmp_path / "storage")) as context:
        with context.checkpoint.store_path({"steps_completed": 1}) as (directory, name):
            (directory / "file").write_text("x")
            (directory / "inside").symlink_to("file")
        (tmp_path / "storage" / name / "out").symlink_to(tmp_path / "secret")
        context.checkpoint.download(name, tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"file", "inside", "metadata.json"}
    assert "out is a link that leads out of the checkpoint" in caplog.text
