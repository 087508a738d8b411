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


def test_captured_state_brings_every_global_generator_back() -> None:
    state = capture_rng()
    first = draw()
    assert draw() != first
    restore_rng(state)
    assert draw() == first
    assert set(state) == {"cpu_rng_state", "np_rng_state", "random_rng_state"}


def test_a_state_whose_tuples_became_lists_can_be_restored() -> None:
    state = capture_rng()
    version, internal, gauss = state["random_rng_state"]
    first = random.random()
    restore_rng({**state, "random_rng_state": [version, list(internal), gauss]})
    assert random.random() == first


def test_isolated_draws_leave_no_trace_even_after_an_error() -> None:
    expected = capture_rng()
    with pytest.raises(RuntimeError, match="inside"), isolated_rng():
        draw()
        raise RuntimeError("inside")
    after = draw()
    restore_rng(expected)
    assert draw() == after


def test_one_seed_makes_every_global_generator_repeat_its_draws() -> None:
    with isolated_rng():
        seed_everything(5)
        first = draw()
        seed_everything(5)
        assert draw() == first
