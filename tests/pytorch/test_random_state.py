"""The global generators: seeding, capturing, restoring and isolating them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from det_lightning.pytorch._random_state import capture_rng, isolated_rng, restore_rng, seed_everything


def draw() -> tuple[float, float, float]:
    """Draw from each global generator, as training does for dropout and augmentation."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_captured_states_restore_all() -> None:
    state = capture_rng()
    version, internal, gauss = state["random_rng_state"]
    with_lists = {**state, "random_rng_state": [version, list(internal), gauss]}
    first = draw()
    assert draw() != first
    for captured in (state, with_lists):
        restore_rng(captured)
        assert draw() == first
    assert set(state) == {"cpu_rng_state", "np_rng_state", "random_rng_state"}


def test_isolated_draws_leave_no_trace() -> None:
    expected = capture_rng()
    with pytest.raises(RuntimeError, match="inside"), isolated_rng():
        draw()
        raise RuntimeError("inside")
    after = draw()
    restore_rng(expected)
    assert draw() == after


def test_one_seed_repeats_all_draws() -> None:
    with isolated_rng():
        seed_everything(5)
        first = draw()
        seed_everything(5)
        assert draw() == first
