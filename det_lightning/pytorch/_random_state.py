"""The random state of the process, and the order of the training data, which a resumed run repeats.

A *pass* is one iteration over the training sampler, from the draw of its first index to its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from det_lightning import errors

# The types of generators whose states are saved.
_GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, random.Random)
# The size of the Mersenne Twister's state.
_WORDS = 624
# What generators raise for a state that does not fit them.
_UNFIT = (TypeError, ValueError, RuntimeError, KeyError, IndexError, OverflowError, AttributeError)


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
        except _UNFIT as e:
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
            _set_state(generator, state[name])
        except _UNFIT as e:
            mistakes.append(f"{name!r}: {'it is missing' if isinstance(e, KeyError) else str(e)[:200]}")
    if mistakes:
        raise errors.InvalidCheckpointException(f"The random state in {source} is damaged: {'; '.join(mistakes)}.")


def _set_state(generator: Any, state: Any) -> None:
    """Give one of :data:`_GENERATORS` a state, or raise one of :data:`_UNFIT`."""
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


def _attributes_of(sampler: Any) -> dict[str, Any]:
    """Return the attributes of a sampler. torch accepts any iterable as one, even a list, which has none."""
    attributes: dict[str, Any] = getattr(sampler, "__dict__", {})
    return attributes


def _samplers_of(sampler: Any) -> Iterator[Any]:
    """Yield ``sampler`` and every sampler that it wraps, outermost first."""
    yield sampler
    for name, value in _attributes_of(sampler).items():
        if isinstance(value, Sampler) or name.lstrip("_") in ("sampler", "batch_sampler"):
            yield from _samplers_of(value)


def _capture_sampler(sampler: Any) -> dict[str, Any]:
    """Return the attributes of a sampler that may change from pass to pass: generators and plain values."""
    state: dict[str, Any] = {}
    for name, value in _attributes_of(sampler).items():
        if isinstance(value, torch.Generator | np.random.RandomState):
            state[name] = value.get_state()
        elif isinstance(value, np.random.Generator):
            state[name] = value.bit_generator.state
        elif isinstance(value, random.Random):
            state[name] = value.getstate()
        elif isinstance(value, bool | int | float | str | None):
            state[name] = value
    return state


class SamplerStates:
    """The states of a batch sampler and of those that it wraps: generators, and values that have changed by now.

    A value that is as it was built, such as a batch size, is a setting of the trial: a resumed run has its own.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self._built = [_capture_sampler(sampler) for sampler in _samplers_of(batch_sampler)]

    def capture(self) -> list[dict[str, Any]]:
        """Return the state of each sampler, outermost first."""
        states = [_capture_sampler(sampler) for sampler in _samplers_of(self._batch_sampler)]
        return [
            {name: value for name, value in state.items() if not _is_setting(value, name, built)}
            for state, built in itertools.zip_longest(states, self._built, fillvalue={})
        ]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Give each sampler what :meth:`capture` returned."""
        for sampler, state in zip(_samplers_of(self._batch_sampler), states, strict=True):
            _restore_sampler(sampler, state)


def _is_setting(value: Any, name: str, built: dict[str, Any]) -> bool:
    return isinstance(value, bool | int | float | str | None) and name in built and built[name] == value


def _restore_sampler(sampler: Any, state: dict[str, Any]) -> None:
    current = _attributes_of(sampler)
    for name, value in state.items():
        try:
            _restore_attribute(sampler, name, current.get(name), value)
        except _UNFIT as e:
            raise errors.InvalidCheckpointException(
                f"The checkpoint has a state for {name!r:.100} of {type(sampler).__name__} that it does not take: {e}"
            ) from e


def _restore_attribute(sampler: Any, name: str, holder: Any, value: Any) -> None:
    if isinstance(holder, _GENERATORS):
        _set_state(holder, value)
    elif not isinstance(value, bool | int | float | str | None):
        raise TypeError(f"a sampler's numbers and texts are kept; got a {type(value).__name__}")
    elif holder is not None and not _are_alike(holder, value):
        raise TypeError(f"it is {holder!r:.100} now; got {value!r:.100}")
    else:
        setattr(sampler, name, value)


def _are_alike(one: Any, other: Any) -> bool:
    return (
        other is None or type(one) is type(other) or (isinstance(one, int | float) and isinstance(other, int | float))
    )


@dataclasses.dataclass(frozen=True)
class PassStart:
    """The random state just before a pass over the training sampler drew its first index.

    ``first_batch`` counts batches over the whole run and all ranks, and so identifies the pass.
    """

    first_batch: int
    rng: dict[str, Any]
    samplers: list[dict[str, Any]]


class PassJournal:
    """Remembers how the latest passes over the training data began, so that a resumed run can repeat their order.

    ``starts`` is what :meth:`state_dict` returned for the checkpoint. ``keep`` passes are remembered, because workers
    that prefetch may be passes ahead of training.
    """

    def __init__(self, starts: list[dict[str, Any]] | None = None, keep: int = 2) -> None:
        self.keep = keep
        self._starts = [PassStart(**start) for start in starts or []]
        self._from_checkpoint = {start.first_batch for start in self._starts}

    def first_batch(self) -> int:
        """Return where the earliest remembered pass began; 0 for a run from the start."""
        return self._starts[0].first_batch if self._starts else 0

    def start_in_checkpoint(self, first_batch: int) -> PassStart | None:
        """Return the start of the pass that begins at ``first_batch``, if the checkpoint has it."""
        return next(
            (s for s in self._starts if s.first_batch == first_batch and first_batch in self._from_checkpoint), None
        )

    def record(self, first_batch: int, samplers: list[dict[str, Any]]) -> None:
        """Remember the current random state, and those of the samplers, as those in which a pass begins."""
        self._starts.append(PassStart(first_batch, capture_rng(), samplers))
        del self._starts[: -self.keep]

    def state_dict(self, next_batch: int) -> list[dict[str, Any]]:
        """Return the passes that are needed to continue with batch ``next_batch`` (over all ranks)."""
        begun = [start.first_batch for start in self._starts if start.first_batch <= next_batch]
        current = max(begun, default=0)
        # Only one level deep: asdict() would copy every tensor.
        return [dict(vars(start)) for start in self._starts if start.first_batch >= current]


class ResumableBatchSampler(BatchSampler):
    """Iterates over ``batch_sampler`` endlessly, from batch ``first_batch`` on, in the order recorded in ``journal``.

    A recorded pass begins in the recorded random state and leaves the global generators unchanged; a new pass draws
    from them and is recorded. The length is that of one pass. The order is repeated if the sampler uses the global
    generators only when a pass begins, generators in its attributes that nothing else draws from, or numbers there. It
    is not if the sampler draws from a global generator for every sample, or changes a list of its own.
    """

    def __init__(self, batch_sampler: Any, journal: PassJournal, first_batch: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.journal = journal
        self.first_batch = first_batch
        self._states = SamplerStates(batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._passes())

    def _passes(self) -> Iterator[Iterator[Any]]:
        """Yield the batches of each pass, as an iterator that runs no Python code of its own per batch."""
        index = self.journal.first_batch()
        while True:
            recorded = self.journal.start_in_checkpoint(index)
            if recorded is None:
                self.journal.record(index, self._states.capture())
                batches = iter(self.batch_sampler)
                skip = max(self.first_batch - index, 0)
                skipped = 0
            else:
                batches, skipped = self._begin_again(recorded)
                skip = 0
            begun_at = index
            numbers = itertools.count(begun_at + skipped)
            numbered = zip(batches, numbers)  # noqa: B905 (the batches end, the numbers do not)
            yield map(operator.itemgetter(0), itertools.islice(numbered, skip, None))
            index = next(numbers)
            if index == begun_at:
                raise ValueError(
                    f"{type(self.batch_sampler).__name__} of the training data yields no batches at all: the dataset "
                    "is empty, or smaller than one batch with drop_last=True."
                )

    def _begin_again(self, start: PassStart) -> tuple[Iterator[Any], int]:
        """Return the rest of the pass, and how many of its batches were skipped because they were already trained.

        Skipped batches are drawn, but neither kept nor loaded.
        """
        self._states.restore(start.samplers)
        skip = max(self.first_batch - start.first_batch, 0)
        with isolated_rng():
            restore_rng(start.rng)
            batches = iter(self.batch_sampler)
            skipped = sum(1 for _ in itertools.islice(batches, skip))
            # Samplers draw when their first batch is taken.
            ready = list(itertools.islice(batches, 1))
        return itertools.chain(ready, batches), skipped
