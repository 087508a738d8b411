"""The generator of a GPU is captured and restored with the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from det_lightning import errors
from det_lightning.pytorch._random_state import capture_rng, restore_rng

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def test_the_generator_of_the_device_repeats_its_draws() -> None:
    state = capture_rng(DEVICE)
    first = torch.rand(3, device=DEVICE)
    restore_rng(state, DEVICE)
    assert torch.equal(torch.rand(3, device=DEVICE), first)


@pytest.mark.parametrize("damaged", [b"", torch.zeros(3, dtype=torch.uint8), torch.zeros(16)])
def test_a_damaged_state_is_refused_before_any_generator_changes(damaged: Any) -> None:
    state = capture_rng(DEVICE)
    torch.rand(1)
    before = torch.get_rng_state()
    with pytest.raises(errors.InvalidCheckpointException, match="gpu_rng_state"):
        restore_rng({**state, "gpu_rng_state": damaged}, DEVICE)
    assert torch.equal(torch.get_rng_state(), before)
