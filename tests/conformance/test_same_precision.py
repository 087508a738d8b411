"""torch.amp on both sides, on the CPU: with a scaler of the CPU, and with those for CUDA, which are disabled there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conformance.sides import compare
from tests.conformance.trials import Basic

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning"),
]

SCALERS: dict[str, Callable[[], Any]] = {
    "cpu": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
    "cuda": lambda: torch.amp.GradScaler("cuda"),
    "torch.cuda.amp": lambda: torch.cuda.amp.GradScaler(),
}


class TwoOptimizers(Basic):
    """Two models and optimizers, one of them clipped; with a scaler of the trial's, or under ``use_amp``."""

    make_scaler: Any = None
    frequency = 1
    overflows: tuple[int, ...] = ()

    def __init__(self, context: Any) -> None:
        self.context = context
        if self.make_scaler is None:
            context.experimental.use_amp()
        self.scaler = None if self.make_scaler is None else context.wrap_scaler(self.make_scaler())
        self.body = context.wrap_model(torch.nn.Linear(3, 5))
        self.head = context.wrap_model(torch.nn.Linear(5, 1))
        self.adam = context.wrap_optimizer(torch.optim.Adam(self.body.parameters(), lr=0.01))
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.02, momentum=0.9))

    def model(self, inputs: torch.Tensor) -> Any:
        return self.head(self.body(inputs))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch) * (float("inf") if batch_idx in self.overflows else 1.0)
        updates = self.scaler is not None and (batch_idx + 1) % self.frequency == 0
        self.context.backward(loss if self.scaler is None else self.scaler.scale(loss))
        if updates:
            self.scaler.unscale_(self.sgd)
        clip = lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5)  # noqa: E731
        self.context.step_optimizer(self.sgd, clip_grads=clip, scaler=self.scaler)
        self.context.step_optimizer(self.adam, scaler=self.scaler)
        if updates:
            self.scaler.update()
        return {"loss": loss}


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("scaler", [None, *SCALERS])
def test_amp_trains_the_same(scaler: str | None, frequency: int) -> None:
    class Amp(TwoOptimizers):
        make_scaler = staticmethod(SCALERS[scaler]) if scaler else None

    Amp.frequency, Amp.overflows = frequency, (1, 5) if scaler == "cpu" else ()
    init = {"aggregation_frequency": frequency}
    trace = compare(Amp, init=init, max_length=9, checkpoint_period=4, checkpoint_policy="none")
    assert all("scaler_state_dict" in checkpoint["keys"] for checkpoint in trace.checkpoints)
    assert bool(trace.checkpoints[-1]["state"]["scaler_state_dict"]) == (scaler == "cpu")


def test_outputs_under_autocast_become_float32() -> None:
    """In lists, tuples and dicts both sides make float32 of float16."""

    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)

        def forward(self, inputs: torch.Tensor) -> Any:
            half = self.linear(inputs).half()
            return {"list": [half, (half, inputs)], "one": half}

    class Autocast(Basic):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.model = context.wrap_model(context.autocast_forward_pass(Nested()))
            self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))

        def loss(self, batch: Any) -> torch.Tensor:
            outputs = self.model(batch[0])
            first, (second, _) = outputs["list"]
            assert first.dtype is second.dtype is outputs["one"].dtype is torch.float32
            return ((first + second - batch[1]) ** 2).mean()

    compare(Autocast, max_length=5, checkpoint_policy="none")
