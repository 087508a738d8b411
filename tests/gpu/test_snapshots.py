"""A copy of a state that is written in the background: made beside the GPU's work, of what was there before it."""

from __future__ import annotations

import pytest
import torch

from det_lightning.checkpoint.storage.snapshots import Snapshotter, iterate_tensors

pytestmark = pytest.mark.gpu


def test_the_host_does_not_wait_and_later_work_does_not_change_the_copy() -> None:
    state = {"weights": torch.ones(8 * 1024**2, device="cuda"), "step": torch.tensor(3)}
    snapshotter = Snapshotter()
    snapshotter.reserving(iterate_tensors(state))()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state["weights"].mul_(2)
        copied = snapshotter.copy(state)
        state["weights"].zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    snapshotter.wait_for_device()
    assert copied["weights"].device.type == "cpu"
    assert torch.equal(copied["weights"], torch.full((8 * 1024**2,), 2.0))
    assert torch.equal(copied["step"], torch.tensor(3))
