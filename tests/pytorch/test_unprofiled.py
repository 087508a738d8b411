"""Zeroing gradients as torch does, with its labels for the profiler only while one runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import data

from det_lightning import pytorch

NUMBERS = data.TensorDataset(torch.arange(10.0), torch.arange(10) % 3)


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
def test_gradients_are_none_after_a_step(kind: Any) -> None:
    context, optimizer = trained(kind)
    assert gradients(optimizer)[0] is not None
    context.step_optimizer(optimizer)
    assert gradients(optimizer) == [None, None]
    assert getattr(optimizer, "calls", 1) == 1


def test_zero_grad_of_the_object_is_called() -> None:
    context, optimizer = trained(torch.optim.SGD)
    calls = []
    optimizer.zero_grad = lambda: calls.append("zero_grad")
    context.step_optimizer(optimizer)
    assert calls == ["zero_grad"]
    assert gradients(optimizer)[0] is not None


def test_what_replaces_zero_grad_of_torch_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    context, optimizer = trained(torch.optim.SGD)
    calls = []
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self: calls.append(type(self)))
    context.step_optimizer(optimizer)
    assert calls == [torch.optim.SGD]


def test_a_profiler_sees_the_labels_that_torch_sets() -> None:
    loader = data.DataLoader(NUMBERS, batch_size=5)
    context, optimizer = trained(torch.optim.SGD)

    def step_plainly(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    labels = []
    for step in (step_plainly, context.step_optimizer):
        batches = iter(loader)
        next(batches)  # the profiler begins in the middle
        with torch.profiler.profile() as profiler:
            for _ in batches:
                step(optimizer)
        labels.append({event.name for event in profiler.events() if "#" in event.name})
    assert labels[0] == labels[1]
    assert len(labels[1]) == 3
