"""Links such as ``latest`` are shown as links, followed for reading within, never written or deleted through."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage, Retention, load_checkpoint, open_checkpoint
from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
from det_lightning.checkpoint.safe_load import inspect_checkpoint, verify_checkpoint
from det_lightning.pytorch import load_trial_from_checkpoint_path
from tests.checkpoint.made_checkpoints import assert_equal, write_checkpoint
from tests.checkpoint.storage.backends import STATE, Backend, backend_of, files_of, write
from tests.cli.test_cli import json_of, run
from tests.trials import SmallTrial


def written_with_a_link(root: Path, to_outside: bool = False) -> tuple[CheckpointStorage, list[str]]:
    """Write three checkpoints of one trial, and link the first as ``latest``, or one that lies elsewhere."""
    storage, notes = CheckpointStorage(root / "storage"), {"trial": "t", "experiment": "e"}
    ids = [write(storage, steps, {**notes, "time": steps, "metric": {"value": float(steps)}}) for steps in (1, 2, 3)]
    target = write(CheckpointStorage(root / "elsewhere")) if to_outside else ids[0]
    (root / "storage/latest").symlink_to(f"../elsewhere/{target}" if to_outside else target)
    return storage, ids


def content(root: Path) -> dict[str, bytes]:
    """Return all files below a directory, those behind links left out."""
    paths = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize("to_outside", [False, True])
def test_link_is_no_checkpoint(tmp_path: Path, to_outside: bool) -> None:
    storage, ids = written_with_a_link(tmp_path, to_outside)
    assert storage.list_ids() == storage.list_ids(complete=False) == sorted(ids)
    assert storage.newest() == str(tmp_path / "storage" / ids[2])
    assert storage.list_links() == {"latest": str((tmp_path / "storage/latest").readlink())}
    assert not storage.is_complete("latest")
    before = content(tmp_path)
    said = r"latest is a link to .*, and nothing is deleted through a link"
    with pytest.raises(errors.CheckpointNotFound, match=said):
        storage.delete("latest")
    assert content(tmp_path) == before
    elsewhere = content(tmp_path / "elsewhere")
    plan = plan_pruning(storage, Retention(0, 1, 1))
    assert plan.to_delete == [ids[1]]
    assert plan.kept == sorted([ids[0], ids[2]])
    carry_out(plan, storage)
    assert storage.list_ids() == sorted([ids[0], ids[2]])
    assert (tmp_path / "storage/latest").is_symlink()
    assert content(tmp_path / "elsewhere") == elsewhere


def test_command_line_shows_links(tmp_path: Path) -> None:
    _, ids = written_with_a_link(tmp_path)
    (tmp_path / "storage/gone").symlink_to("nothing")
    lines = run("ls", tmp_path / "storage").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ids[::-1]
    assert [line.split() for line in lines[5:]] == [["gone", "->", "nothing", "link"], ["latest", "->", ids[0], "link"]]
    listed = json_of("ls", tmp_path / "storage")
    assert [entry["uuid"] for entry in listed["checkpoints"]] == ids[::-1]
    assert listed["links"] == {"gone": "nothing", "latest": ids[0]}
    assert "1 kept" not in run("prune", tmp_path / "storage", "--yes", "--trial-latest", 3).stdout
    assert len(json_of("verify", tmp_path / "storage")["checkpoints"]) == 3


@pytest.mark.parametrize("to_outside", [False, True])
def test_link_is_read_as_its_target(tmp_path: Path, to_outside: bool) -> None:
    storage, ids = written_with_a_link(tmp_path, to_outside)
    real = (tmp_path / "storage/latest").resolve()
    for name in ("latest", tmp_path / "storage/latest", f"{tmp_path}/storage/latest/"):
        assert storage.find(name) == str(real)
    assert real.name == ids[0] or to_outside
    for path in (storage.find("latest"), tmp_path / "storage/latest"):
        loaded = load_checkpoint(path)
        assert_equal(loaded.state, STATE)
        assert loaded.name == real.name
    assert "Checkpoint latest" in run("show", tmp_path / "storage/latest").stdout


def test_storage_behind_a_link_works(tmp_path: Path) -> None:
    _, ids = written_with_a_link(tmp_path)
    (tmp_path / "data").symlink_to("storage")
    storage = CheckpointStorage(tmp_path / "data")
    assert storage.find("latest") == str(tmp_path / "data" / ids[0])
    storage.delete(ids[1])
    assert storage.list_ids() == sorted([ids[0], ids[2]])


def test_delete_keeps_targets_of_links(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "storage")
    checkpoint = tmp_path / "storage" / write(storage)
    (tmp_path / "data/determined").mkdir(parents=True)
    for name in ("state_dict.pth", "determined/state_dict.pth", "metadata.json"):
        (tmp_path / "data" / name).write_text("precious")
    for name in ("determined", "more"):
        (checkpoint / name).symlink_to(tmp_path / "data" / name.replace("more", ""))
    (checkpoint / "state_dict.pth").unlink()
    (checkpoint / "state_dict.pth").symlink_to(tmp_path / "data/state_dict.pth")
    before = content(tmp_path / "data")
    storage.delete(checkpoint.name)
    assert [*(tmp_path / "storage").iterdir()] == []
    assert content(tmp_path / "data") == before


@pytest.mark.parametrize(
    ("name", "refused"), [("", "write"), ("", "delete"), ("staging", "write"), ("removed", "delete")]
)
def test_bookkeeping_behind_a_link_is_refused(tmp_path: Path, name: str, refused: str) -> None:
    storage = CheckpointStorage(tmp_path / "storage")
    kept = write(storage)
    precious = tmp_path / "elsewhere/staging" / f"{kept}.lock"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    link = tmp_path / "storage/.det_lightning" / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious.parents[2])
    before = content(tmp_path)
    for action in (storage.remove_leftovers, lambda: write(storage) if refused == "write" else storage.delete(kept)):
        with pytest.raises(errors.StorageError, match=r"is a link to .*, and nothing is written or deleted through a"):
            action()
    assert content(tmp_path) == before


@pytest.mark.parametrize("where", ["{id}", ".det_lightning/staging/{id}.new", "{id}/.metadata.json.{pid}.tmp"])
def test_no_write_through_a_link(tmp_path: Path, where: str) -> None:
    storage = CheckpointStorage(tmp_path / "storage")
    checkpoint_id = "epoch=1"
    precious = tmp_path / "precious"
    precious.write_text("precious")
    link = tmp_path / "storage" / where.format(id=checkpoint_id, pid=os.getpid())

    def place(_: Path | None = None) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(precious)

    in_checkpoint = where.startswith("{id}/")
    if not in_checkpoint:
        place()
    try:
        storage.write(files_of(), checkpoint_id, report_written=place if in_checkpoint else None)
    except errors.CheckpointError as e:
        assert "No checkpoint can be written" in str(e)
    assert precious.read_text() == "precious"


@pytest.mark.slow
def test_links_of_an_sftp_server_are_known(tmp_path: Path, sftp_options: dict[str, Any]) -> None:
    backend: Backend = backend_of("sftp", tmp_path, sftp_options)
    storage = backend.storage()
    ids = [write(storage), write(storage)]
    (tmp_path / "storage/latest").symlink_to(ids[0])
    assert storage.list_ids() == sorted(ids)
    assert storage.list_links() == {"latest": ""}
    with pytest.raises(errors.CheckpointNotFound, match="is a link, and nothing is deleted through a link"):
        storage.delete("latest")
    with open_checkpoint(storage.find("latest"), backend.options) as directory:
        assert_equal(load_checkpoint(directory).state, STATE)
    (tmp_path / "data").mkdir()
    (tmp_path / "storage/other").mkdir()
    (tmp_path / "storage/other/.det_lightning").symlink_to(tmp_path / "data")
    with pytest.raises(errors.StorageError, match="nothing is written or deleted through a link"):
        write(backend.storage("/other"))
    assert [*(tmp_path / "data").iterdir()] == []


# In a checkpoint, of which no file is read through a link that leads out


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
