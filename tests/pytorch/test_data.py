"""Data loaders, batches on their way to the device, and the streams that training and validation read."""

from __future__ import annotations

import collections
import itertools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from det_lightning.pytorch import DataLoader, data_length, samplers, to_device
from det_lightning.pytorch._random_state import PassJournal

TEN: Any = range(10)


def values(loader: Any, count: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader, count)]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(TEN)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 2, "sampler": [5, 3, 1]},
        {"batch_sampler": [[1, 2], [9]]},
        {"batch_size": 5, "collate_fn": lambda items: torch.tensor([sum(items)])},
        {"batch_size": 5, "in_order": True},
    ],
)
def test_arguments_mean_what_they_mean_in_torch(arguments: dict[str, Any]) -> None:
    """In each of two passes."""
    passes = []
    for kind in (DataLoader, torch.utils.data.DataLoader):
        torch.manual_seed(3)
        loader: Any = kind(TEN, **arguments)
        passes.append([len(loader), values(loader), values(loader)])
    assert passes[0] == passes[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Stream()}, "IterableDataset Stream.*disable_dataset_reproducibility_checks"),
        ({"dataset": TEN, "batch_size": None}, "batch_size=None and batch_sampler=None"),
    ],
)
def test_unusable_loader_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(**arguments)


@given(st.integers(0, 20), st.integers(1, 3))
def test_resumable_loader_gives_the_batches_of_a_plain_one(first_batch: int, num_replicas: int) -> None:
    loader = DataLoader(TEN, 3)
    journal = PassJournal()
    journal.ranks = num_replicas
    for rank in range(num_replicas):
        resumable = loader.get_resumable_loader(journal, first_batch, num_replicas, rank)
        assert values(resumable, 8) == values(loader.get_data_loader(True, first_batch, num_replicas, rank), 8)


class Pair(NamedTuple):
    left: Any
    right: Any


class Movable:
    place: Any = None

    def to(self, device: torch.device) -> Movable:
        self.place = device
        return self


def test_a_batch_is_moved_at_any_depth() -> None:
    tensor = torch.ones(2)
    batch = {"a": [tensor, (np.arange(2), Movable())], 3: np.float32([1.5])}  # type: ignore[arg-type]
    moved = to_device(batch, torch.device("meta"))
    assert [part.is_meta for part in (moved["a"][0], moved["a"][1][0], moved[3], tensor)] == [True, True, True, False]
    assert moved["a"][1][1].place == torch.device("meta")
    assert [type(moved["a"]), type(moved["a"][1])] == [list, tuple]


def test_moving_makes_new_containers() -> None:
    tensor = torch.ones(2)
    batch: list[Any] = [tensor, {"x": tensor}, (tensor,)]
    moved = to_device(batch, "cpu")
    assert moved == batch
    assert moved is not batch and moved[1] is not batch[1]
    assert moved[0] is moved[1]["x"] is moved[2][0] is tensor


def test_derived_containers_are_moved_as_plain_ones() -> None:
    batch = collections.OrderedDict(x=Pair(np.ones(2), torch.nn.Parameter(torch.ones(1))))
    moved = to_device(batch, "meta")
    assert (type(moved), type(moved["x"])) == (dict, tuple)
    assert [(part.is_meta, part.shape) for part in moved["x"]] == [(True, (2,)), (True, (1,))]
    assert data_length(collections.OrderedDict(x=torch.nn.Parameter(torch.ones(3)))) == 3


class Encoding(collections.UserDict[str, Any]):
    """As a tokenizer of transformers returns it."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: value.to(device) for name, value in self.items()})


@pytest.mark.parametrize("kind", [collections.UserDict, types.MappingProxyType, collections.ChainMap])
def test_any_mapping_is_moved_as_a_dict(kind: Callable[[Any], Any]) -> None:
    batch = kind({"x": torch.ones(3, 2), "y": [np.ones(3)]})
    assert data_length(batch) == 3
    moved = to_device(batch, "meta")
    assert type(moved) is dict
    assert moved["x"].is_meta and moved["y"][0].is_meta


def test_mapping_with_to_moves_itself() -> None:
    moved = to_device([Encoding(x=torch.ones(3, 2))], "meta")[0]
    assert type(moved) is Encoding and moved["x"].is_meta
    assert data_length(moved) == 3


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "i1", "i8", "u1", "?"])
def test_arrays_become_tensors(dtype: str) -> None:
    moved = to_device(np.ones(3, dtype), "cpu")
    assert isinstance(moved, torch.Tensor)
    assert moved.numpy().dtype == np.dtype(dtype)


def test_each_unmoved_type_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    words = np.array(["a", "b"])
    warned: set[type] = set()
    with caplog.at_level(logging.WARNING, logger="det_lightning.pytorch"):
        moved = to_device({"s": "text", "n": 3, "again": "more", "w": words, "none": None}, "cpu", warned)
        to_device(data=["once more", 4], device="cpu", warned_types=warned)
    assert moved == {"s": "text", "n": 3, "again": "more", "w": words, "none": None}
    assert [vars(record)["args"][0] for record in caplog.records] == ["str", "int", "ndarray", "NoneType"]
    assert warned == {str, int, np.ndarray, type(None)}


def test_length_of_a_batch_is_that_of_its_first_tensor() -> None:
    ones = torch.ones(3)
    for batch in (torch.ones(3, 2), np.ones((3, 2)), [ones], (np.ones(3), 1), {"x": ones, "y": "label"}):
        assert data_length(batch) == 3, batch
    empties: list[Any] = [{}, [], ()]
    for empty in empties:
        with pytest.raises(ValueError, match=f"got an empty {type(empty).__name__}"):
            data_length(empty)
    with pytest.raises(TypeError, match="batch of type Movable is unknown; override get_batch_length"):
        data_length(Movable())


def test_list_serves_as_a_batch_sampler() -> None:
    loader = DataLoader(TEN, batch_sampler=[[0, 1], [4, 5]]).get_resumable_loader(PassJournal(), first_batch=1)
    assert values(loader, 3) == [[4, 5], [0, 1], [4, 5]]


# Samplers; tests/conformance has their elements


class Tap(Sampler[int]):
    """Counts without end, and knows how many numbers were taken."""

    taken = 0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            self.taken += 1
            yield number


@pytest.mark.parametrize(
    ("num_workers", "rank", "message"),
    [
        (0, 0, "num_workers must be at least 1; got 0"),
        (2, 2, r"rank must be in \[0, num_workers=2\); got 2"),
        (2, -1, r"rank must be in \[0, num_workers=2\); got -1"),
    ],
)
def test_impossible_shards_are_refused(num_workers: int, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        samplers.DistributedBatchSampler(BatchSampler(range(9), 3, False), num_workers, rank)


@pytest.mark.parametrize(
    ("wrap", "taken"),
    [
        (samplers.RepeatSampler, 1),
        (lambda source: samplers.SkipSampler(source, 2), 3),
        (lambda source: samplers.DistributedSampler(source, 4, 3), 4),
        (lambda source: samplers.RepeatBatchSampler(BatchSampler(source, 5, False)), 5),
        (lambda source: samplers.SkipBatchSampler(BatchSampler(source, 5, False), 2), 15),
        (lambda source: samplers.DistributedBatchSampler(BatchSampler(source, 5, False), 3, 1), 10),
    ],
)
def test_no_sample_is_taken_early(wrap: Any, taken: int) -> None:
    source = Tap()
    iterator = iter(wrap(source))
    assert source.taken == 0
    next(iterator)
    assert source.taken == taken
