"""apex levels on two processes of the real Horovod: an overflow on one rank is one of all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.horovod.conftest import Launch
from tests.distributed.horovod.levels import LEVELS
from tests.precision.test_precision_ranks import TOLERANCE, results

pytestmark = pytest.mark.slow

MODULE = "tests.distributed.horovod.levels"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """What every level left behind, on two ranks and on one."""
    found = tmp_path_factory.mktemp("levels")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("working_directory"))
        launch(MODULE, str(found), "2")
        launch(MODULE, str(found), "1", launcher="none")
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_skip_together(folder: Path, level: str) -> None:
    first, second = results(folder, level, 2)
    assert len(first["updates"]) == len(second["updates"]) > 3
    for ours, theirs in zip(first["updates"], second["updates"], strict=True):
        assert torch.equal(ours, theirs)
    (one,) = results(folder, level, 1)
    torch.testing.assert_close(first["updates"][-1], one["updates"][-1], **TOLERANCE)
    assert first["amp_state"] == second["amp_state"] == one["amp_state"]
    assert first["amp_state"]["loss_scaler0"]["loss_scale"] == 2.0**14
