"""A file whose SHA-256 was recorded is read with its objects, from a copy; any other file is not even copied."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from det_lightning import errors
from det_lightning.checkpoint.format.layout import digest_file
from det_lightning.checkpoint.safe_load.reading import read_known_state


class Meter:
    """A class of a trial."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"meter": Meter()}, tmp_path / "state.pth")
    return tmp_path / "state.pth"


def test_recorded_file_is_read(path: Path) -> None:
    assert isinstance(read_known_state(path, recorded=[digest_file(path)])["meter"], Meter)


def test_recorded_file_that_cannot_be_copied_is_not_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(errors.UnsafeCheckpointError, match=r"Meter.* could run code"):
        read_known_state(path, recorded=["0" * 64])  # another file need not be copied
    with pytest.raises(OSError, match="missing"):
        read_known_state(path, recorded=[digest_file(path)])
