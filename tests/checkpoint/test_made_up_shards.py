"""Sharded checkpoints that nobody has written: indexes that lie, and files that are none."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.checkpoint.exports import merge_checkpoint
from det_lightning.checkpoint.format.layout import STAGING_MARK
from det_lightning.checkpoint.storage.staging import StagingDirectory, remove_dead_stagings
from tests.checkpoint.made_checkpoints import write_checkpoint


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """End a test that waits for what never comes."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def sharded(folder: Path, shape: tuple[int, ...], part: list[Any]) -> Path:
    """Return a checkpoint with one tensor, of which the index says that ``part`` is all."""
    checkpoint = write_checkpoint(folder)
    state = torch.load(checkpoint / "state_dict.pth", weights_only=False)
    state["models_state_dict"] = [{"weight": torch.empty(shape, device="meta")}]
    shards = checkpoint / "shards"
    shards.mkdir()
    torch.save(state, shards / "state.pth")
    parts = {"state.models_state_dict.0.weight": part}
    (shards / "index-00000.json").write_text(json.dumps({"version": 1, "parts": parts}))
    for name in ("state_dict.pth", "resume.pth"):
        (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / "metadata.json").write_text(json.dumps({"steps_completed": 1}))
    return checkpoint


def sound(folder: Path) -> Path:
    """Return a checkpoint with a tensor of ones in one part."""
    torch.save(torch.ones(2, 3), folder / "part")
    size = (folder / "part").stat().st_size
    checkpoint = sharded(folder / "storage", (2, 3), [0, 0, 2, "__0_0.distcp", 0, size])
    return (folder / "part").rename(checkpoint / "shards" / "__0_0.distcp").parents[1]


def test_what_the_index_says_is_read(tmp_path: Path) -> None:
    """Without this the tests below could pass for another reason."""
    assert torch.equal(load_checkpoint(sound(tmp_path)).state["models_state_dict"][0]["weight"], torch.ones(2, 3))


def test_merge_survives_a_cleanup(tmp_path: Path) -> None:
    class Busy(CheckpointStorage):
        def stage(self, checkpoint_id: str | None = None) -> StagingDirectory:
            remove_dead_stagings()  # as another run does when it begins
            return super().stage(checkpoint_id)

    checkpoint = sound(tmp_path)
    (checkpoint / "code" / STAGING_MARK).write_text("")
    (checkpoint / "code" / ".gitignore").write_text("package/\n")  # an imported module had been copied all the same
    merged = merge_checkpoint(checkpoint, Busy(tmp_path / "merged"))
    assert {path.name for path in (tmp_path / "merged" / merged / "code").iterdir()} >= {"model_def.py", "package"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_pipe_in_place_of_a_part_is_refused(tmp_path: Path) -> None:
    """Opening one waits for a writer."""
    checkpoint = sharded(tmp_path, (0, 5), [1, 0, 5, "__0_0.distcp", 0, 0])
    os.mkfifo(checkpoint / "shards" / "__0_0.distcp")
    with pytest.raises(errors.IncompleteCheckpointError, match=r"__0_0\.distcp must be a file of at least 0 bytes"):
        load_checkpoint(checkpoint)


def test_tensor_larger_than_memory_is_refused(tmp_path: Path) -> None:
    size = 2**43
    checkpoint = sharded(tmp_path, (size // 4,), [0, 0, size // 4, "__0_0.distcp", 0, size])
    with (checkpoint / "shards" / "__0_0.distcp").open("wb") as sparse:
        sparse.truncate(size)
    with pytest.raises(errors.CheckpointError, match=r"weight|__0_0\.distcp"):
        load_checkpoint(checkpoint)


WRONG_NUMBERS: list[list[Any]] = [[0, -1, 3, 0, 10], [9, 0, 2, 0, 10], [0, 0, 2, 2**80, 10], [0, 0, 2, 0, 2**80]]
WRONG_NUMBERS += [[0, 0, True, 0, 10], [0, 1, 1, 0, 10], [0, 0, 2.0, 0, 10]]
WRONG_PARTS: list[Any] = [[*numbers[:3], "__0_0.distcp", *numbers[3:]] for numbers in WRONG_NUMBERS]
WRONG_PARTS += [[0, 0, 2, "../state.pth", 0, 10], [0, 0, 2, "__0_0.distcp\n", 0, 10], {"dim": 0}, None]


@pytest.mark.parametrize("part", WRONG_PARTS, ids=str)
def test_part_that_cannot_be_is_refused(part: Any, tmp_path: Path) -> None:
    checkpoint = sharded(tmp_path, (2, 3), part)
    (checkpoint / "shards" / "__0_0.distcp").write_bytes(b"x" * 100)
    with pytest.raises(errors.IncompleteCheckpointError, match=r"index-00000\.json|__0_0\.distcp|do not make up"):
        load_checkpoint(checkpoint)
