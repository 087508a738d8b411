"""The random state of the process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from det_lightning import errors

# The types of generators whose states are saved.
GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, random.Random)
# The size of the Mersenne Twister's state.
_WORDS = 624
# What generators raise for a state that does not fit them.
UNFIT = (TypeError, ValueError, RuntimeError, KeyError, IndexError, OverflowError, AttributeError)


def seed_everything(seed: int) -> None:
    """Seed torch's, numpy's and Python's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of torch's, numpy's and Python's global generators, under the keys used in checkpoints.

    The generator of a CUDA device is also captured, as ``gpu_rng_state``.
    """
    state: dict[str, Any] = {
        "cpu_rng_state": torch.get_rng_state(),
        "np_rng_state": np.random.get_state(),
        "random_rng_state": random.getstate(),
    }
    if device is not None and device.type == "cuda":
        state["gpu_rng_state"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore what :func:`capture_rng` returned; all of it, or nothing if the CUDA generator refuses its state."""
    if device is not None and device.type == "cuda" and "gpu_rng_state" in state:
        try:
            torch.cuda.set_rng_state(state["gpu_rng_state"], device)
        except UNFIT as e:
            raise errors.InvalidCheckpointException(f"The random state 'gpu_rng_state' is damaged: {e}") from e
    if "cpu_rng_state" in state:
        torch.set_rng_state(state["cpu_rng_state"])
    np.random.set_state(state["np_rng_state"])
    version, internal, gauss = state["random_rng_state"]
    random.setstate((version, tuple(internal), gauss))


def require_rng(state: Any, source: str, *, without_torch: bool = False) -> None:
    """Raise, naming all mistakes, unless :func:`restore_rng` can use a state; the global generators are not changed.

    With ``without_torch`` only the other generators are checked. The state of a GPU is left to :func:`restore_rng`.
    """
    generators = {
        "cpu_rng_state": torch.Generator(),
        "np_rng_state": np.random.RandomState(),
        "random_rng_state": random.Random(),
    }
    if without_torch:
        del generators["cpu_rng_state"]
    mistakes = []
    for name, generator in generators.items():
        try:
            set_state(generator, state[name])
        except UNFIT as e:
            mistakes.append(f"{name!r}: {'it is missing' if isinstance(e, KeyError) else str(e)[:200]}")
    if mistakes:
        raise errors.InvalidCheckpointException(f"The random state in {source} is damaged: {'; '.join(mistakes)}.")


def set_state(generator: Any, state: Any) -> None:
    """Give one of :data:`GENERATORS` a state, or raise one of :data:`UNFIT`."""
    if isinstance(generator, np.random.RandomState):
        attempt = np.random.RandomState()
        attempt.set_state(state)
        _require_position(attempt.get_state(legacy=False)["state"]["pos"])
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        _require_position(state["state"].get("pos", 0))
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
        if not isinstance(gauss, float | None):
            raise TypeError(f"the next normal value should be a number; got a {type(gauss).__name__}")
    else:
        generator.set_state(state)


def _require_position(position: Any) -> None:
    """Raise unless a position is valid for numpy's Mersenne Twister: numpy would read beyond its memory."""
    if type(position) is not int or not 0 <= position <= _WORDS:
        raise ValueError(f"the position should be from 0 to {_WORDS}; got {position}")


@contextlib.contextmanager
def isolated_rng() -> Iterator[None]:
    """Undo, on leaving, every draw from the global generators that was made inside."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)
