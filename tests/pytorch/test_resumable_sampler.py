"""A resumed run sees the same order of data, and leaves the generators, as one that was never interrupted."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from det_lightning.pytorch import samplers
from det_lightning.pytorch._data import DataLoader, adapt_batch_sampler
from det_lightning.pytorch._position import ResumableBatchSampler
from det_lightning.pytorch._random_state import (
    PassJournal,
    SamplerStates,
    capture_rng,
    isolated_rng,
    restore_rng,
    seed_everything,
)


class RotatingSampler(Sampler[int]):
    """Begins each pass one sample later; the number of passes is all it remembers."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from ((i + self.epoch) % self.size for i in range(self.size))

    def __len__(self) -> int:
        return self.size


class ShuffledBy(RotatingSampler):
    """Shuffles by a generator in one of its attributes."""

    def __init__(self, size: int, generator: Any) -> None:
        super().__init__(size)
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        self.generator.shuffle(order)
        return iter(order)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def in_batches(sampler: Any, batch_size: int) -> BatchSampler:
    return BatchSampler(sampler, batch_size, drop_last=False)


#: Samplers of the numbers below a size.
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "in order": lambda size: SequentialSampler(range(size)),
    "global torch": lambda size: RandomSampler(range(size)),
    "global torch, with replacement": lambda size: WeightedRandomSampler([1.0] * size, size, replacement=True),
    "own torch generator, with replacement": lambda size: RandomSampler(range(size), True, size + 40, seeded()),
    "own torch generator": lambda size: RandomSampler(range(size), generator=seeded()),
    "global numpy": lambda size: ShuffledBy(size, np.random),
    "own numpy generator": lambda size: ShuffledBy(size, np.random.default_rng(4)),
    "own python generator": lambda size: ShuffledBy(size, random.Random(4)),
    "reproducible": lambda size: samplers.ReproducibleShuffleSampler(SequentialSampler(range(size)), seed=6),
    "epoch counter": RotatingSampler,
}
#: Samplers whose batches are shuffled too, by the sampler within.
OF_BATCHES = {"reproducible batches": "in order", "batches shuffled, and samples too": "global torch"}
KINDS = [*SAMPLERS, *OF_BATCHES]


def make_batch_sampler(kind: str, size: int, batch_size: int) -> Any:
    if kind in OF_BATCHES:
        within = in_batches(SAMPLERS[OF_BATCHES[kind]](size), batch_size)
        return samplers.ReproducibleShuffleBatchSampler(within, seed=6)
    return in_batches(SAMPLERS[kind](size), batch_size)


@dataclasses.dataclass
class Run:
    """One rank that trains on batches; ``ahead`` of them are asked for before they are needed, as workers do."""

    make_sampler: Callable[[], Any]
    ranks: int
    rank: int
    ahead: int

    def train(self, first: int, last: int, checkpoint: bytes | None, draws_between: bool) -> tuple[list[Any], bytes]:
        """Train from batch ``first`` to ``last``; return what was seen and drawn, and a checkpoint."""
        saved = None if checkpoint is None else torch.load(io.BytesIO(checkpoint), weights_only=False)
        keep = 2 + self.ahead * self.ranks
        journal = PassJournal(saved and saved["journal"], keep, saved and saved["position"])
        endless = ResumableBatchSampler(self.make_sampler(), journal, first * self.ranks)
        batches = iter(adapt_batch_sampler(endless, num_replicas=self.ranks, rank=self.rank))
        waiting = deque(next(batches) for _ in range(self.ahead))
        if saved is not None:
            restore_rng(saved["rng"])
        seen: list[Any] = []
        for _ in range(first, last):
            waiting.append(next(batches))
            seen.append((waiting.popleft(), draw() if draws_between else None))
        written = io.BytesIO()
        starts = journal.state_dict(last * self.ranks)
        torch.save({"journal": starts, "position": journal.positions()["training"], "rng": capture_rng()}, written)
        return seen, written.getvalue()


@pytest.mark.slow
@settings(max_examples=20)
@given(
    size=st.integers(1, 20),
    batch_size=st.integers(1, 7),
    placement=st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    stops=st.lists(st.integers(0, 25), min_size=1, max_size=3),
    ahead=st.integers(0, 3),
    draws_between=st.booleans(),
)
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_draws_as_a_straight_one(
    kind: str, size: int, batch_size: int, placement: tuple[int, int], stops: list[int], ahead: int, draws_between: bool
) -> None:
    run = Run(lambda: make_batch_sampler(kind, size, batch_size), *placement, ahead)
    length = max(stops) + 5
    with isolated_rng():
        seed_everything(1)
        straight, _ = run.train(0, length, None, draws_between)
        after_straight = draw()

        resumed: list[Any] = []
        checkpoint: Any = None
        seed_everything(1)
        for first, last in zip([0, *sorted(stops)], [*sorted(stops), length], strict=True):
            part, checkpoint = run.train(first, last, checkpoint, draws_between)
            resumed += part
            seed_everything(1000 + last)  # a new process knows nothing of the old one's generators
        assert resumed == straight
        restore_rng(torch.load(io.BytesIO(checkpoint), weights_only=False)["rng"])
        assert draw() == after_straight


@pytest.mark.parametrize("kind", KINDS)
def test_resumable_sampler_repeats_like_the_plain_one(kind: str) -> None:
    with isolated_rng():
        seed_everything(2)
        resumable = ResumableBatchSampler(make_batch_sampler(kind, 10, 3), PassJournal())
        taken = list(itertools.islice(resumable, 12))
        seed_everything(2)
        repeated = samplers.RepeatBatchSampler(make_batch_sampler(kind, 10, 3))
        assert taken == list(itertools.islice(repeated, 12))
        assert len(resumable) == len(repeated)


class CountedBatch(list[int]):
    """A batch of an index; ``alive`` counts those that exist, ``most`` how many did at a time."""

    alive = 0
    most = 0

    def __init__(self, index: int) -> None:
        super().__init__([index])
        CountedBatch.alive += 1
        CountedBatch.most = max(CountedBatch.most, CountedBatch.alive)

    def __del__(self) -> None:
        CountedBatch.alive -= 1


class CountedPass(Sampler[Any]):
    """Yields a million batches in a pass."""

    def __iter__(self) -> Iterator[CountedBatch]:
        return map(CountedBatch, range(1_000_000))

    def __len__(self) -> int:
        return 1_000_000


class CountedData(Dataset[int]):
    reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


@pytest.mark.slow
def test_resume_after_millions_of_batches_reads_nothing_before() -> None:
    data = CountedData()
    start = {"first_batch": 2_000_000, "rng": capture_rng(), "samplers": [{}]}
    loader = DataLoader(data, batch_sampler=CountedPass()).get_resumable_loader(PassJournal([start]), 2_999_990)
    assert next(iter(loader)).tolist() == [999_990]
    assert data.reads == 1
    assert CountedBatch.most <= 4


@pytest.mark.parametrize("sampler", [BatchSampler(range(0), 4, False), BatchSampler(range(3), 4, True)])
def test_sampler_without_batches_is_refused(sampler: BatchSampler) -> None:
    with pytest.raises(ValueError, match="BatchSampler of the training data yields no batches at all: the dataset is"):
        next(iter(ResumableBatchSampler(sampler, PassJournal())))


def test_a_journal_keeps_needed_passes() -> None:
    journal = PassJournal(keep=3)
    for first_batch in (0, 2, 4, 6):
        journal.begin_pass(first_batch)
    for trained, kept in ((6, [6]), (5, [4, 6]), (0, [2, 4, 6])):
        assert [start["first_batch"] for start in journal.state_dict(trained)] == kept


def test_only_recorded_passes_repeat() -> None:
    journal = PassJournal()
    journal.begin_pass(0)
    assert journal.recorded == []
    resumed = PassJournal(journal.state_dict(1))
    resumed.begin_pass(2)
    assert [start["first_batch"] for start in resumed.recorded] == [0]


def test_checkpoints_without_positions_resume() -> None:
    """As the first releases wrote them."""
    straight, again = (make_batch_sampler("own torch generator", 10, 3) for _ in range(2))
    expected = list(itertools.islice(ResumableBatchSampler(straight, journal := PassJournal()), 12))
    resumed = ResumableBatchSampler(again, PassJournal(journal.state_dict(9)), first_batch=9)
    assert list(itertools.islice(resumed, 3)) == expected[9:]


def test_another_batch_size_keeps_the_sample_position() -> None:
    before = iter(ResumableBatchSampler(in_batches(RotatingSampler(8), 2), journal := PassJournal()))
    for _ in range(5):  # workers have begun the second pass, and the fourth batch is trained next
        next(before)
    sampler = ResumableBatchSampler(in_batches(RotatingSampler(8), 4), PassJournal(journal.state_dict(3)), 3)
    assert next(iter(sampler)) == [6, 7, 0, 1]


def test_unchanged_values_are_settings() -> None:
    sampler = RotatingSampler(4)
    states = SamplerStates(sampler)
    as_built = states.capture()
    sampler.epoch = 1
    changed = states.capture()
    assert (as_built, changed) == ([{}], [{"epoch": 1}])
    states.restore(as_built)
    assert sampler.epoch == 0
    states.restore(changed)
    assert sampler.epoch == 1


# The global generators: seeding, capturing, restoring and isolating them


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
