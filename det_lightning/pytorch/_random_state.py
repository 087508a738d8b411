"""The random state of the process and of samplers, and a journal of the passes over the training data.

A *pass* is one iteration over the training sampler, from the draw of the first index to the end.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import operator
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Sampler

from det_lightning import errors
from det_lightning.arguments import wrong_argument

# Checkpoints hold the states of generators of these types.
GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, random.Random)
# The types of attributes of samplers to copy for another pass.
_COPIED = (*GENERATORS, Sampler, list, dict, set, np.ndarray, torch.Tensor)
# The types of other attributes of a sampler in checkpoints.
_PLAIN = (bool, int, float, str, type(None))
# The size of the Mersenne Twister's state.
_WORDS = 624
# Errors of generators for a state that does not fit.
UNFIT = (TypeError, ValueError, RuntimeError, KeyError, IndexError, OverflowError, AttributeError)
# The entry with what the state_dict() of a sampler returned.
_OWN_STATE = "state_dict()"


@runtime_checkable
class Stateful(Protocol):
    """Data that know their own position, for example a ``StatefulDataLoader`` of torchdata, or a sampler."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state; the next iterator continues from there."""


def require_seed(seed: Any) -> None:
    """Raise a ValueError unless torch's, numpy's and Python's generators take the seed."""
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(wrong_argument("trial_seed", "an integer from 0 to 2**32 - 1", seed))


def seed_everything(seed: int) -> None:
    """Seed torch's, numpy's and Python's global generators; raise a ValueError for another value than a seed."""
    require_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of torch's, numpy's and Python's global generators, under the keys used in checkpoints.

    For a CUDA device, ``gpu_rng_state`` has the state of the device's generator. There are no arrays of numpy, which
    ``torch.load`` refuses by default; ``np.random.set_state`` takes lists, too.
    """
    name, words, *rest = cast("tuple[Any, ...]", np.random.get_state())
    state: dict[str, Any] = {
        "cpu_rng_state": torch.get_rng_state(),
        "np_rng_state": (name, words.tolist(), *rest),
        "random_rng_state": random.getstate(),
    }
    if device is not None and device.type == "cuda":
        state["gpu_rng_state"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore the states that :func:`capture_rng` returned: all, or none if the CUDA generator refuses a state."""
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
    """Raise an error that names every mistake in a state for :func:`restore_rng`; no global generator is changed.

    With ``without_torch``, torch's generator is not checked. :func:`restore_rng` checks the state of a GPU.
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


def get_state(generator: Any) -> Any:
    """Return the state of one of :data:`GENERATORS`, without arrays of numpy."""
    if isinstance(generator, np.random.Generator):
        return _with_lists(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else _with_lists(generator.get_state())


def _with_lists(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _with_lists(part) for name, part in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_with_lists, state))
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


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
            raise TypeError(f"the next normal value must be a number; got a {type(gauss).__name__}")
    else:
        generator.set_state(state)


def _require_position(position: Any) -> None:
    """Raise unless a position is valid for numpy's Mersenne Twister: numpy would read beyond its memory."""
    if type(position) is not int or not 0 <= position <= _WORDS:
        raise ValueError(f"the position must be from 0 to {_WORDS}; got {position}")


@contextlib.contextmanager
def isolated_rng() -> Iterator[None]:
    """Undo, on leaving, every draw from the global generators inside the block."""
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


def _get_attributes(sampler: Any) -> dict[str, Any]:
    """Return the attributes of a sampler; a list, which torch accepts as a sampler, has none."""
    return getattr(sampler, "__dict__", {})


def _is_sampler_name(name: Any) -> bool:
    """Return whether an attribute of this name holds a sampler, which may be any iterable."""
    return str(name).lstrip("_") in ("sampler", "batch_sampler")


def _walk_samplers(sampler: Any) -> Iterator[Any]:
    """Yield ``sampler`` and every wrapped sampler, outermost first."""
    yield sampler
    for name, value in _get_attributes(sampler).items():
        if isinstance(value, Sampler) or _is_sampler_name(name):
            yield from _walk_samplers(value)


def copy_sampling(loader: Any) -> Any:
    """Return a loader with copies of the generator and the samplers; what the samplers sample from is shared."""
    made = {id(loader.dataset): loader.dataset}
    names = ("generator", "sampler", "batch_sampler")
    sampling = {name: _copy_part(vars(loader)[name], made, name != "generator") for name in names}
    apart = copy.copy(loader)
    vars(apart).update(sampling, persistent_workers=False, _iterator=None)
    return apart


def _copy_part(part: Any, made: dict[int, Any], is_sampler: bool = False) -> Any:
    """Return a copy of a sampler, a generator, or a container of these; ``made`` has copies by the original's id."""
    if id(part) in made or not (is_sampler or isinstance(part, _COPIED)):
        return made.get(id(part), part)
    made[id(part)] = copied = copy.deepcopy(part) if isinstance(part, GENERATORS) else copy.copy(part)
    if isinstance(copied, list):
        copied[:] = [_copy_part(one, made) for one in copied]
    parts = copied if isinstance(copied, dict) else _get_attributes(copied)
    parts.update({name: _copy_part(one, made, _is_sampler_name(name)) for name, one in parts.items()})
    return copied


class SamplerStates:
    """The states of samplers and of those they wrap: generators, and attributes that changed since they were built.

    An unchanged attribute, such as a batch size, is a setting of the trial: a resumed run sets it anew.
    """

    def __init__(self, *samplers: Any) -> None:
        self._samplers = [one for sampler in samplers for one in _walk_samplers(sampler)]
        self._built = [dict(_get_attributes(sampler)) for sampler in self._samplers]

    def capture(self, *, between_passes: bool = False) -> list[dict[str, Any]]:
        """Return the state of each sampler, outermost first; ``between_passes`` also its ``state_dict()``."""
        states = []
        for sampler, built in zip(self._samplers, self._built, strict=True):
            state: dict[str, Any] = {}
            for name, value in getattr(sampler, "__dict__", {}).items():
                if isinstance(value, GENERATORS):
                    state[name] = get_state(value)
                elif isinstance(value, _PLAIN) and not (name in built and built[name] == value):
                    state[name] = value
            if between_passes and isinstance(sampler, Stateful):
                state[_OWN_STATE] = copy.deepcopy(sampler.state_dict())
            states.append(state)
        return states

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore the states that :meth:`capture` returned, unless the number of samplers has changed."""
        if len(self._samplers) == len(states):
            for sampler, built, state in zip(self._samplers, self._built, states, strict=True):
                settings = {name: value for name, value in built.items() if isinstance(value, _PLAIN)}
                _restore_sampler(sampler, settings | state)


def _restore_sampler(sampler: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        try:
            if name == _OWN_STATE:
                sampler.load_state_dict(copy.deepcopy(value))
            else:
                _restore_attribute(sampler, name, value)
        except UNFIT as e:
            raise errors.InvalidCheckpointException(
                f"The state of {name!r:.100} in the checkpoint does not fit {type(sampler).__name__}: {e}"
            ) from e


def _restore_attribute(sampler: Any, name: str, value: Any) -> None:
    present = _get_attributes(sampler).get(name)
    if isinstance(present, GENERATORS):
        set_state(present, value)
        return
    if present is None and isinstance(value, torch.Tensor | dict | tuple):
        return  # the state of a generator that the sampler no longer has
    if not isinstance(value, _PLAIN):
        raise TypeError(f"it must be a number or a text; got a {type(value).__name__}")
    are_numbers = isinstance(present, int | float) and isinstance(value, int | float)
    if not (present is None or value is None or type(present) is type(value) or are_numbers):
        raise TypeError(f"it must be like the present {present!r:.100}; got {value!r:.100}")
    setattr(sampler, name, value)


class PassJournal:
    """Records how the latest passes over the training data began, so that a resumed run repeats their order.

    An entry has the number of the pass's ``first_batch``, counted over the whole run and all ranks, and the states
    before the first draw: ``rng`` of the global generators, and ``samplers``. From a checkpoint come ``recorded``, the
    result of :meth:`state_dict`, and ``resumed_at``, the training position of :meth:`positions`. ``keep`` passes are
    kept, because workers may be passes ahead of training. ``ranks`` batches, one for each rank when the training began,
    make a global batch. ``ask_data`` returns the state of data that know their position before a batch.
    """

    ranks = 1
    ask_data: Callable[[int], dict[str, Any] | None] | None = None

    def __init__(
        self, recorded: list[dict[str, Any]] | None = None, keep: int = 2, position: dict[str, Any] | None = None
    ) -> None:
        self.keep = keep
        self.recorded = recorded or []
        self.resumed_at = position or {}
        self.samplers = SamplerStates()
        self.validation_samplers = SamplerStates()
        self._starts = [*self.recorded]
        self._numbers: Iterator[int] | None = None

    def count_from(self, batch: int) -> Iterator[int]:
        """Return the numbers of the batches to draw from the sampler, beginning with ``batch``."""
        self._numbers = numbers = iter(range(batch, sys.maxsize))
        return numbers

    def begin_pass(self, first_batch: int) -> None:
        """Remember the current states of the global generators and the samplers as the beginning of a pass."""
        self._starts = [start for start in self._starts if start["first_batch"] < first_batch]
        samplers = self.samplers.capture(between_passes=True)
        self._starts.append({"first_batch": first_batch, "rng": capture_rng(), "samplers": samplers})
        del self._starts[: -self.keep]

    def forget(self) -> None:
        """Drop all that was recorded: the size of the batches has changed."""
        self.recorded, self.resumed_at, self._starts = [], {}, []

    def state_dict(self, batches_trained: int) -> list[dict[str, Any]]:
        """Return the passes needed to continue after ``batches_trained`` global batches."""
        next_batch = batches_trained * self.ranks
        following = bisect.bisect_right(self._starts, next_batch, key=operator.itemgetter("first_batch"))
        return [*map(dict, self._starts[max(following - 1, 0) :])]

    def positions(self, batches_trained: int = 0) -> dict[str, Any]:
        """Return the positions of the loaders: states of samplers, and in training the number of ``drawn`` batches.

        Training data that know their position add their state as ``data``.
        """
        training = self.resumed_at
        if self._numbers is not None or not training:  # otherwise nothing was drawn again yet
            drawn = 0 if self._numbers is None else sys.maxsize - operator.length_hint(self._numbers)
            training = {"drawn": drawn, "samplers": self.samplers.capture()}
        data = None if self.ask_data is None else self.ask_data(batches_trained)
        validation = self.validation_samplers.capture(between_passes=True)
        return {"training": training, "validation": validation} | ({} if data is None else {"data": data})
