"""Loading and zeroing as torch does them, with its labels for the profiler only while one runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import data

from det_lightning import pytorch
from det_lightning.engine.loaders import iterate_batches

NUMBERS = data.TensorDataset(torch.arange(10.0), torch.arange(10) % 3)


class DrawingDataset(data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + index


class EndsEarly(DrawingDataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise StopIteration  # torch takes that for the end of the data
        return super().__getitem__(index)


class CountingData(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class ReversedLoader(data.DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed([*super().__iter__()])


def total(samples: list[Any]) -> torch.Tensor:
    return torch.stack(samples).sum() + torch.rand(())


LOADERS = {
    "in order": lambda: data.DataLoader(NUMBERS, batch_size=3),
    "shuffled": lambda: data.DataLoader(NUMBERS, batch_size=3, shuffle=True, drop_last=True),
    "own generator": lambda: data.DataLoader(DrawingDataset(), 3, True, generator=torch.Generator().manual_seed(5)),
    "drawing": lambda: data.DataLoader(DrawingDataset(), batch_size=3, shuffle=True, collate_fn=total),
    "ends early": lambda: data.DataLoader(EndsEarly(), batch_size=3),
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
def test_batches_and_draws_equal_those_of_torch(name: str) -> None:
    def two_passes(iterate: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = LOADERS[name]()
        return [drawn(iterate(loader)), drawn(iterate(loader))]

    expected = two_passes(iter)
    assert expected[0]
    torch.testing.assert_close(two_passes(iterate_batches), expected, rtol=0, atol=0)


class CountedSGD(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def trained(kind: Any) -> tuple[pytorch.PyTorchTrialContext, Any]:
    """Return a context and its optimizer of two groups; only the first parameter has a gradient."""
    context = pytorch.PyTorchTrialContext()
    model = context.wrap_model(torch.nn.Linear(2, 1))
    optimizer = kind([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    weight: Any = model.weight
    weight.sum().backward()
    return context, context.wrap_optimizer(optimizer)


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
    return [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("kind", [torch.optim.SGD, CountedSGD])
def test_no_gradients_after_a_step(kind: Any) -> None:
    context, optimizer = trained(kind)
    assert gradients(optimizer)[0] is not None
    context.step_optimizer(optimizer)
    assert gradients(optimizer) == [None, None]
    assert getattr(optimizer, "calls", 1) == 1


@pytest.mark.parametrize("of_object", [True, False])
def test_a_replaced_zero_grad_is_called(of_object: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    context, optimizer = trained(torch.optim.SGD)
    calls: list[Any] = []
    monkeypatch.setattr(optimizer if of_object else torch.optim.Optimizer, "zero_grad", lambda *own: calls.append(own))
    context.step_optimizer(optimizer)
    assert calls == [() if of_object else (optimizer,)]
    assert gradients(optimizer)[0] is not None


def test_a_profiler_sees_torchs_labels() -> None:
    loader = data.DataLoader(NUMBERS, batch_size=5)
    context, optimizer = trained(torch.optim.SGD)

    def step_plainly(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    labels = []
    for iterate, step in ((iter, step_plainly), (iterate_batches, context.step_optimizer)):
        batches: Any = iterate(loader)
        next(batches)  # the profiler begins in the middle
        with torch.profiler.profile() as profiler:
            for _ in batches:
                step(optimizer)
        labels.append({event.name for event in profiler.events() if "#" in event.name})
    assert labels[0] == labels[1]
    assert len(labels[1]) == 3
