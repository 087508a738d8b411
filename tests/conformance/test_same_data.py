"""Batches of every shape, loaders of every kind, and the samplers one by one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning.pytorch import DataLoader, samplers
from tests.conformance.sides import compare, epoch
from tests.conformance.trials import SAMPLES, Basic, Drawing, make_data

theirs = pytest.importorskip("determined.pytorch")


def loading(make_loader: Any, unpack: Any = lambda batch: batch, validate_too: bool = False) -> type[Basic]:
    """Return a trial that trains on what ``make_loader(api, context)`` loads."""

    class Loading(Basic):
        def build_training_data_loader(self) -> Any:
            return make_loader(self.api, self.context)

        def build_validation_data_loader(self) -> Any:
            return self.build_training_data_loader() if validate_too else super().build_validation_data_loader()

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(unpack(batch))

        def evaluate_batch(self, batch: Any) -> Any:
            return {"v": batch[0].sum()}

    return Loading


def collated(shape: Any) -> Any:
    """Return a loader maker whose batches are ``shape(inputs, targets)``."""

    def collate(samples: list[Any]) -> Any:
        return shape(torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples]))

    return lambda api, context: api.DataLoader(make_data(), batch_size=4, shuffle=True, collate_fn=collate)


class Doubled(torch.Tensor):
    """Is doubled when it is moved."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().to(*args, **kwargs).as_subclass(torch.Tensor) * 2


class Renamed(dict[str, Any]):
    """Has other names for those who iterate over its items."""

    def items(self) -> Any:
        return [(name.upper(), value) for name, value in super().items()]


@pytest.mark.parametrize(
    ("shape", "unpack"),
    [
        (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
        (lambda x, y: (x.numpy(), y.numpy()), lambda b: b),
        (lambda x, y: [{"in": [x]}, {"out": (y, y.numpy())}], lambda b: (b[0]["in"][0], b[1]["out"][1])),
        (lambda x, y: torch.cat([x, y], 1), lambda b: (b[:, :3], b[:, 3:])),
        (lambda x, y: {"x": x, "y": y, "ids": "abc", "n": 3, "texts": np.array(["a"])}, lambda b: (b["x"], b["y"])),
        (lambda x, y: (x.as_subclass(Doubled), [y.as_subclass(Doubled)]), lambda b: (b[0], b[1][0])),
        (lambda x, y: Renamed(x=x, y=Renamed(y=y)), lambda b: (b["X"], b["Y"]["Y"])),
    ],
    ids=["dict", "numpy", "nested", "tensor", "not all can be moved", "tensor with its own to()", "dict of its own"],
)
def test_batches_of_any_shape_train_the_same(shape: Any, unpack: Any) -> None:
    compare(loading(collated(shape), unpack), max_length=8)


def test_batches_that_are_not_moved_train_the_same() -> None:
    def make_loader(api: Any, context: Any) -> Any:
        context.experimental.disable_auto_to_device()
        return collated(lambda x, y: (x.numpy(), y.numpy()))(api, context)

    compare(loading(make_loader, lambda batch: tuple(map(torch.as_tensor, batch))), max_length=8)


def skipping_loader(api: Any, context: Any) -> Any:
    """Return one that builds the real one itself."""

    class Skipping(api.DataLoader):
        def get_data_loader(self, repeat: bool = False, **arguments: Any) -> Any:
            return super().get_data_loader(repeat, **{**arguments, "skip": arguments["skip"] + 2 * repeat})

    return Skipping(make_data(), batch_size=4, shuffle=True)


def endless_loader(api: Any, context: Any) -> Any:
    context.experimental.disable_dataset_reproducibility_checks()
    sampler = api.samplers.ReproducibleShuffleSampler(torch.utils.data.SequentialSampler(make_data()), seed=5)
    batches = torch.utils.data.BatchSampler(api.samplers.RepeatSampler(sampler), 4, drop_last=False)
    batches = api.samplers.SkipBatchSampler(api.samplers.DistributedBatchSampler(batches, 1, 0), 2)
    return torch.utils.data.DataLoader(make_data(), batch_sampler=batches)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        data = make_data()
        yield from (data[i % len(data)] for i in itertools.count())


def stream_loader(api: Any, context: Any) -> Any:
    """Return one of an iterable dataset, which has no length, so its epoch does not end."""
    context.experimental.disable_dataset_reproducibility_checks()
    return torch.utils.data.DataLoader(Stream(), batch_size=4)


def shuffled_samples(api: Any, context: Any) -> Any:
    sampler = api.samplers.ReproducibleShuffleSampler(torch.utils.data.SequentialSampler(make_data()), 3)
    return api.DataLoader(make_data(), batch_size=4, sampler=sampler)


def shuffled_batches(api: Any, context: Any) -> Any:
    batches = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(make_data()), 4, drop_last=True)
    return api.DataLoader(make_data(), batch_sampler=api.samplers.ReproducibleShuffleBatchSampler(batches, 3))


def own_generator(api: Any, context: Any) -> Any:
    return api.DataLoader(make_data(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(
    ("make_loader", "validate_too"),
    [
        (skipping_loader, True),
        (endless_loader, False),
        (stream_loader, False),
        (shuffled_samples, False),
        (shuffled_batches, False),
        (own_generator, False),
        (own_generator, True),  # its sampler draws once more at the end of the data
    ],
)
def test_loaders_of_the_user_train_the_same(make_loader: Any, validate_too: bool) -> None:
    trace = compare(loading(make_loader, validate_too=validate_too), max_length=15, validation_period=4)
    assert len(trace.named("on_validation_end")) == 4


class Unsteady(list[Any]):
    """Batches of a sampler that says how many there are, which need not be right."""

    says: int

    def __len__(self) -> int:
        return self.says


@pytest.mark.parametrize("says", [1, 4, 9])
def test_batch_samplers_of_a_wrong_length_train_the_same(says: int) -> None:
    """Epochs end by what the training one says; a validation goes on to the end of the data."""
    batches = Unsteady(range(i, min(i + 4, SAMPLES)) for i in range(0, SAMPLES, 4))
    batches.says = says
    unsteady = loading(lambda api, context: api.DataLoader(make_data(), batch_sampler=batches), validate_too=True)
    trace = compare(unsteady, max_length=epoch(2), validation_period=epoch(1))
    assert [len(outputs) - 1 for _, outputs in trace.named("on_validation_epoch_end")] == [6, 6]


class Augmented(torch.utils.data.Dataset[Any]):
    """Augments its samples by draws from each global generator."""

    def __init__(self, samples: int) -> None:
        self.data = make_data(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.data[index]
        return inputs + torch.rand(()) + float(np.random.rand()) + random.random(), targets


@pytest.mark.parametrize(
    ("workers", "frequency"),
    [({}, 1), ({}, 4), ({"num_workers": 2}, 4), ({"num_workers": 1, "persistent_workers": True}, 1)],
)
def test_datasets_draw_the_same_random_numbers(workers: dict[str, Any], frequency: int) -> None:
    class Augmenting(Drawing):
        def build_training_data_loader(self) -> Any:
            return self.api.DataLoader(Augmented(22), 4, shuffle=True, **workers)

        def build_validation_data_loader(self) -> Any:
            return self.api.DataLoader(Augmented(10), 4, shuffle=True, **workers)

    fit: dict[str, Any] = {"validation_period": 4, "checkpoint_period": 3, "step_zero_validation": True}
    compare(Augmenting, init={"aggregation_frequency": frequency}, max_length=9, **fit)


@given(
    length=st.integers(0, 30),
    batch=st.integers(1, 7),
    workers=st.integers(1, 4),
    rank=st.integers(0, 3),
    skip=st.integers(0, 12),
    drop_last=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_samplers_give_the_same_elements(
    length: int, batch: int, workers: int, rank: int, skip: int, drop_last: bool
) -> None:
    rank %= workers
    results = []
    for module in (theirs.samplers, samplers):
        samples = torch.utils.data.SequentialSampler(range(length))
        batches = torch.utils.data.BatchSampler(samples, batch, drop_last)
        shuffled = module.ReproducibleShuffleSampler(samples, seed=3)
        made = [
            module.DistributedSampler(samples, workers, rank),
            module.DistributedBatchSampler(batches, workers, rank),
            module.SkipSampler(samples, skip),
            module.SkipBatchSampler(batches, skip),
            shuffled,
            shuffled,  # a second pass goes on shuffling from the same state
            module.ReproducibleShuffleBatchSampler(batches, seed=4),
        ]
        listed = [(len(sampler), list(sampler)) for sampler in made]
        if length >= batch:
            endless = [module.RepeatSampler(samples), module.RepeatBatchSampler(batches)]
            listed += [(len(sampler), list(itertools.islice(sampler, 40))) for sampler in endless]
        results.append(listed)
    assert results[0] == results[1]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize(("skip", "replicas", "rank"), [(0, 1, 0), (3, 1, 0), (0, 3, 2), (2, 2, 1)])
def test_loaders_built_by_hand_give_the_same_batches(repeat: bool, skip: int, replicas: int, rank: int) -> None:
    loaded: list[list[Any]] = []
    for kind in (theirs.DataLoader, DataLoader):
        torch.manual_seed(0)
        loader = kind(make_data(), batch_size=3, shuffle=True).get_data_loader(repeat, skip, replicas, rank)
        loaded.append([len(loader), *(torch.cat(batch, 1) for batch in itertools.islice(loader, 20))])
    assert loaded[0][0] == loaded[1][0]
    assert all(torch.equal(a, b) for a, b in zip(loaded[0][1:], loaded[1][1:], strict=True))


def only_inputs(samples: list[Any]) -> torch.Tensor:
    return torch.stack([inputs for inputs, _ in samples])


@pytest.mark.parametrize(
    "changes",
    [
        {"collate_fn": only_inputs},
        {"dataset": make_data(40), "batch_sampler": torch.utils.data.BatchSampler(range(30, 40), 2, drop_last=False)},
        {"num_workers": 1, "prefetch_factor": 2, "persistent_workers": True, "collate_fn": only_inputs},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_loader_is_built_from_changed_attributes(changes: dict[str, Any]) -> None:
    loaded: list[list[Any]] = []
    for kind in (theirs.DataLoader, DataLoader):
        loader = kind(make_data(), batch_size=3, pin_memory=False, timeout=0)
        for name, value in changes.items():
            setattr(loader, name, value)
        built = loader.get_data_loader()
        attributes = ("pin_memory", "timeout", "num_workers", "prefetch_factor", "persistent_workers", "collate_fn")
        assert [getattr(loader, name) for name in attributes] == [getattr(built, name) for name in attributes]
        loaded.append([batch if isinstance(batch, torch.Tensor) else torch.cat(batch, 1) for batch in built])
    assert all(torch.equal(a, b) for a, b in zip(*loaded, strict=True))
