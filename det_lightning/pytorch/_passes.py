"""The order of the training data, which a resumed run repeats, and the states of samplers.

A *pass* is one iteration over the training sampler, from the draw of its first index to its end.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from det_lightning import errors
from det_lightning.pytorch._random_state import GENERATORS, UNFIT, capture_rng, isolated_rng, restore_rng, set_state


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
    """The states of samplers and of those that they wrap: generators, and values that have changed by now.

    A value that is as it was built, such as a batch size, is a setting of the trial: a resumed run has its own.
    """

    def __init__(self, *samplers: Any) -> None:
        self._samplers = samplers
        self._built = [_capture_sampler(sampler) for sampler in self._all()]

    def _all(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(_samplers_of, self._samplers))

    def capture(self) -> list[dict[str, Any]]:
        """Return the state of each sampler, outermost first."""
        states = [_capture_sampler(sampler) for sampler in self._all()]
        new: dict[str, Any] = {}
        return [
            {name: value for name, value in state.items() if not _is_setting(value, name, built)}
            for state, built in itertools.zip_longest(states, self._built, fillvalue=new)
        ]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Give each sampler what :meth:`capture` returned, unless there are others now."""
        samplers = [*self._all()]
        if len(samplers) == len(states):
            for sampler, state in zip(samplers, states, strict=True):
                _restore_sampler(sampler, state)


def _is_setting(value: Any, name: str, built: dict[str, Any]) -> bool:
    return isinstance(value, bool | int | float | str | None) and name in built and built[name] == value


def _restore_sampler(sampler: Any, state: dict[str, Any]) -> None:
    current = _attributes_of(sampler)
    for name, value in state.items():
        try:
            _restore_attribute(sampler, name, current.get(name), value)
        except UNFIT as e:
            raise errors.InvalidCheckpointException(
                f"The checkpoint has a state for {name!r:.100} of {type(sampler).__name__} that it does not take: {e}"
            ) from e


def _restore_attribute(sampler: Any, name: str, holder: Any, value: Any) -> None:
    if isinstance(holder, GENERATORS):
        set_state(holder, value)
    elif holder is None and isinstance(value, torch.Tensor | dict | tuple):
        pass  # the state of a generator that the sampler no longer has
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

    ``starts`` is what :meth:`state_dict` returned for the checkpoint, and ``position`` what :meth:`position` did.
    ``keep`` passes are remembered, because workers that prefetch may be passes ahead of training.
    """

    def __init__(
        self, starts: list[dict[str, Any]] | None = None, keep: int = 2, position: dict[str, Any] | None = None
    ) -> None:
        self.keep = keep
        self._starts = [PassStart(**start) for start in starts or []]
        #: The passes of the checkpoint, and where its run was within them, if it is known.
        self.recorded = [*self._starts]
        self.resumed_at = position or {}
        self.samplers = SamplerStates()
        self._numbers: Iterator[int] | None = None

    def count_from(self, batch: int) -> Iterator[int]:
        """Return the numbers of the batches that are drawn from the sampler from now on, of which ``batch`` is next."""
        self._numbers = numbers = iter(range(batch, sys.maxsize))
        return numbers

    def begin_pass(self, first_batch: int) -> None:
        """Remember the current states of the global generators and the samplers as those in which a pass begins."""
        self._starts = [start for start in self._starts if start.first_batch < first_batch]
        self._starts.append(PassStart(first_batch, capture_rng(), self.samplers.capture()))
        del self._starts[: -self.keep]

    def state_dict(self, next_batch: int) -> list[dict[str, Any]]:
        """Return the passes that are needed to continue with batch ``next_batch`` (over all ranks)."""
        begun = [start.first_batch for start in self._starts if start.first_batch <= next_batch]
        current = max(begun, default=0)
        # Only one level deep: asdict() would copy every tensor.
        return [dict(vars(start)) for start in self._starts if start.first_batch >= current]

    def position(self) -> dict[str, Any]:
        """Return the number of batches ``drawn`` from the sampler in the whole run, and the states of its samplers."""
        if self._numbers is None and self.resumed_at:
            return self.resumed_at  # nothing was drawn again yet
        drawn = 0 if self._numbers is None else sys.maxsize - operator.length_hint(self._numbers)
        return {"drawn": drawn, "samplers": self.samplers.capture()}


class ResumableBatchSampler(BatchSampler):
    """Iterates over ``batch_sampler`` endlessly, from batch ``first_batch`` on, in the order recorded in ``journal``.

    Recorded passes begin in their random state, up to the batch that the interrupted run had drawn last; samplers then
    get the states that they had by then, and the global generators are as before. A new pass draws from them and is
    recorded. The length is that of one pass. The order is not repeated if a sampler changes a list of its own, or if
    workers prefetch while it draws from a generator for every sample that something else draws from too.
    """

    def __init__(self, batch_sampler: Any, journal: PassJournal, first_batch: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.journal = journal
        self.first_batch = first_batch
        journal.samplers = SamplerStates(batch_sampler)
        if journal.recorded and not journal.resumed_at:
            # The first releases noted no position. A pass is recorded once its first batch is asked for.
            drawn = max(first_batch, journal.recorded[-1].first_batch + 1)
            journal.resumed_at = {"drawn": drawn, "samplers": []}

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._passes())

    def _passes(self) -> Iterator[Iterator[Any]]:
        """Yield the batches of each pass, as an iterator that runs no Python code of its own per batch."""
        ready, batches, begun_at, index = self._repeat()
        while True:
            numbers = self.journal.count_from(index)
            numbered = zip(batches, numbers)  # noqa: B905 (the batches end, the numbers do not)
            skip = max(self.first_batch - index, 0)
            yield itertools.chain(ready, map(operator.itemgetter(0), itertools.islice(numbered, skip, None)))
            index = next(numbers)
            if index == begun_at:
                raise ValueError(
                    f"{type(self.batch_sampler).__name__} of the training data yields no batches at all: the dataset "
                    "is empty, or smaller than one batch with drop_last=True."
                )
            ready, batches, begun_at = [], self._begin(index), index

    def _begin(self, index: int) -> Iterator[Any]:
        self.journal.begin_pass(index)
        return iter(self.batch_sampler)

    def _repeat(self) -> tuple[list[Any], Iterator[Any], int, int]:
        """Draw again what the interrupted run had drawn.

        Return the batches that were drawn but not trained, the rest of their pass, where that begins, and the number of
        the next batch. Batches that were trained are drawn, but neither kept nor loaded.
        """
        recorded, samplers = self.journal.recorded, self.journal.samplers
        if not recorded:
            return [], self._begin(0), 0, 0
        until = self.journal.resumed_at["drawn"]
        trained = min(self.first_batch, until)
        ready: list[Any] = []
        index = recorded[0].first_batch
        with isolated_rng():
            for start in recorded:
                if start.first_batch != index:  # the data or the batches have another size now
                    break
                samplers.restore(start.samplers)
                restore_rng(start.rng)
                begun_at, batches = index, iter(self.batch_sampler)
                index += sum(1 for _ in itertools.islice(batches, max(trained - index, 0)))
                drawn = list(itertools.islice(batches, max(until - index, 0)))
                ready += drawn
                index += len(drawn)
        samplers.restore(self.journal.resumed_at["samplers"])
        return ready, batches, begun_at, index
