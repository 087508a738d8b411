"""Loading and zeroing as torch does them, with its labels for the profiler only while one runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import data

from det_lightning.pytorch._unprofiled import batches_of, zero_grad

NUMBERS = data.TensorDataset(torch.arange(10.0), torch.arange(10) % 3)


class DrawingDataset(data.Dataset[torch.Tensor]):
    """Draws from the global generator for each sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + index


class LoadedAtOnce(DrawingDataset):
    """Loads a whole batch in one call, in the opposite order."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in reversed(indices)]


class EndsEarly(DrawingDataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise StopIteration  # torch takes that for the end of the data
        return super().__getitem__(index)


class DrawsWhenAsked(data.Sampler[int]):
    """Draws its order as soon as an iterator is made, before the first index is taken."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10).tolist())

    def __len__(self) -> int:
        return 10


class CountingData(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


class ReversedLoader(data.DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed([*super().__iter__()])


def total(samples: list[Any]) -> torch.Tensor:
    return torch.stack(samples).sum() + torch.rand(())


LOADERS = {
    "in order": lambda: data.DataLoader(NUMBERS, batch_size=3),
    "shuffled": lambda: data.DataLoader(NUMBERS, batch_size=3, shuffle=True, drop_last=True),
    "own generator": lambda: data.DataLoader(
        DrawingDataset(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "drawing": lambda: data.DataLoader(DrawingDataset(), batch_size=3, shuffle=True, collate_fn=total),
    "at once": lambda: data.DataLoader(LoadedAtOnce(), batch_size=3),
    "ends early": lambda: data.DataLoader(EndsEarly(), batch_size=3),
    "eager sampler": lambda: data.DataLoader(DrawingDataset(), batch_size=3, sampler=DrawsWhenAsked()),
    "batch sampler": lambda: data.DataLoader(DrawingDataset(), batch_sampler=[[1, 2], [5], [0, 9]]),
    "samples": lambda: data.DataLoader(DrawingDataset(), batch_size=None),
    "iterable": lambda: data.DataLoader(CountingData(), batch_size=3),
    "workers": lambda: data.DataLoader(DrawingDataset(), batch_size=3, shuffle=True, num_workers=1),
    "a class of its own": lambda: ReversedLoader(NUMBERS, batch_size=3),
    "a list": lambda: [1, 2, 3],
}


def drawn(batches: Iterator[Any]) -> list[Any]:
    """Return the batches, each with the random number that follows it."""
    return [(batch, torch.rand(()).item()) for batch in batches]


@pytest.mark.parametrize("name", LOADERS)
def test_batches_and_random_numbers_are_those_of_torch(name: str) -> None:
    def two_passes(iterate: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = LOADERS[name]()
        return [drawn(iterate(loader)), drawn(iterate(loader))]

    expected = two_passes(iter)
    assert expected[0]
    # Equal to the bit: numbers that differ by rounding have other representations.
    assert repr_of(two_passes(batches_of)) == repr_of(expected)


def repr_of(passes: list[Any]) -> str:
    torch.set_printoptions(precision=17)
    try:
        return repr(passes)
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize(("name", "is_torchs"), [("shuffled", False), ("workers", True), ("iterable", True)])
def test_torch_iterates_where_a_batch_takes_more_than_loading(name: str, is_torchs: bool) -> None:
    loader: Any = LOADERS[name]()
    assert (type(batches_of(loader)) is type(iter(loader))) == is_torchs


def test_a_timeout_without_workers_is_refused_as_by_torch() -> None:
    with pytest.raises(AssertionError):  # torch 2.6 gives no message
        batches_of(data.DataLoader(NUMBERS, timeout=5))


class CountedSGD(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def trained(kind: Any) -> Any:
    """Return an optimizer of two groups; the gradient of its first parameter is not None."""
    one, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    one.sum().backward()
    return kind([{"params": [one]}, {"params": [other]}], lr=0.1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, CountedSGD])
def test_gradients_are_none_afterwards(kind: Any) -> None:
    optimizer = trained(kind)
    zero_grad(optimizer)
    assert [parameter.grad for group in optimizer.param_groups for parameter in group["params"]] == [None, None]
    assert getattr(optimizer, "calls", 1) == 1


def test_a_method_of_the_object_is_called() -> None:
    optimizer = trained(torch.optim.SGD)
    calls = []
    optimizer.zero_grad = lambda: calls.append("zero_grad")
    zero_grad(optimizer)
    assert calls == ["zero_grad"]


def test_a_later_method_of_torch_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self: calls.append(type(self)))
    zero_grad(trained(torch.optim.SGD))
    assert calls == [torch.optim.SGD]


def test_a_profiler_sees_the_labels_that_torch_sets() -> None:
    loader = data.DataLoader(NUMBERS, batch_size=5)
    labels = []
    for iterate, zero in ((iter, torch.optim.SGD.zero_grad), (batches_of, zero_grad)):
        optimizer = trained(torch.optim.SGD)
        with torch.profiler.profile() as profiler:
            for _ in iterate(loader):
                zero(optimizer)
        labels.append({event.name for event in profiler.events() if "#" in event.name})
    assert labels[0] == labels[1]
    assert len(labels[1]) == 2
