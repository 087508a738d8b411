"""Values in place of a storage or a checkpoint: the error says what is expected, and what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from det_lightning import core, errors, pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint, open_checkpoint, read_checkpoint
from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.trials import fit_trial


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
