"""Checkpoints that other releases of torch and Lightning have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters import other_releases

ARCHIVES = sorted(Path(__file__).parent.joinpath("files").glob("torch_*.tar.gz"))


@pytest.mark.parametrize("name", other_releases.NAMES)
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_checkpoint_of_another_release_resumes(archive: Path, name: str, tmp_path: Path) -> None:
    other_releases.unpack(archive, tmp_path)
    # To the bit on one machine; this may be another one.
    assert other_releases.difference(tmp_path / name) < 1e-5
