"""A checkpoint of a short run, for tests that change their copy of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from det_lightning.checkpoint import CheckpointStorage
from tests.checkpoint.made_checkpoints import fit, forget_checksums


@pytest.fixture(scope="session")
def three_batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that a run of 3 batches wrote, without checksums."""
    storage = tmp_path_factory.mktemp("run") / "storage"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(storage.parent)  # whose files become the code
        fit(storage, 3)
    (name,) = CheckpointStorage(storage).list_ids()
    forget_checksums(storage / name)
    return storage / name


@pytest.fixture
def trained(three_batches: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint, in a storage of its own."""
    return Path(shutil.copytree(three_batches, tmp_path / "storage" / three_batches.name))
