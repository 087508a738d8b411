"""torch.amp on both sides, on the CPU: with a scaler of the CPU, and with those for CUDA, which are disabled there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conformance.sides import Trace, compare
from tests.conformance.trials import basic

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning"),
]

SCALERS: dict[str, Callable[[], Any]] = {
    "cpu": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
    "cuda": lambda: torch.amp.GradScaler("cuda"),
    "torch.cuda.amp": lambda: torch.cuda.amp.GradScaler(),
}


def two_optimizers(api: Any, make_scaler: Callable[[], Any] | None, overflows: tuple[int, ...] = ()) -> type:
    """Two models and optimizers, one of them clipped; with a scaler of the trial's, or under ``use_amp``."""

    class TwoOptimizers(basic(api)):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            self.context = context
            if make_scaler is None:
                context.experimental.use_amp()
            else:
                self.scaler = context.wrap_scaler(make_scaler())
            self.body = context.wrap_model(torch.nn.Linear(3, 5))
            self.head = context.wrap_model(torch.nn.Linear(5, 1))
            self.adam = context.wrap_optimizer(torch.optim.Adam(self.body.parameters(), lr=0.01))
            self.sgd = context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.02, momentum=0.9))

        def loss(self, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return ((self.head(self.body(inputs)) - targets) ** 2).mean()

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.loss(batch) * (float("inf") if batch_idx in overflows else 1.0)
            scaler = None if make_scaler is None else self.scaler
            self.context.backward(loss if scaler is None else scaler.scale(loss))
            if scaler is not None and self.updates(batch_idx):
                scaler.unscale_(self.sgd)
            clip = lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5)  # noqa: E731
            self.context.step_optimizer(self.sgd, clip_grads=clip, scaler=scaler)
            self.context.step_optimizer(self.adam, scaler=scaler)
            if scaler is not None and self.updates(batch_idx):
                scaler.update()
            return {"loss": loss}

        def updates(self, batch_idx: int) -> bool:
            frequency: int = self.frequency
            return (batch_idx + 1) % frequency == 0

        frequency = 1

    return TwoOptimizers


def aggregated(make_trial: Callable[[Any], type], frequency: int) -> Callable[[Any], type]:
    return lambda api: type("Aggregated", (make_trial(api),), {"frequency": frequency})


def run(make_trial: Callable[[Any], type], frequency: int) -> Trace:
    return compare(
        aggregated(make_trial, frequency),
        init={"aggregation_frequency": frequency},
        max_length=lambda api: api.Batch(9),
        checkpoint_period=lambda api: api.Batch(4),
        checkpoint_policy="none",
    )


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("scaler", SCALERS)
def test_wrap_scaler(scaler: str, frequency: int) -> None:
    overflows = (1, 5) if scaler == "cpu" else ()
    trace = run(lambda api: two_optimizers(api, SCALERS[scaler], overflows), frequency)
    assert all("scaler_state_dict" in checkpoint["keys"] for checkpoint in trace.checkpoints)
    assert bool(trace.checkpoints[-1]["state"]["scaler_state_dict"]) == (scaler == "cpu")


@pytest.mark.parametrize("frequency", [1, 3])
def test_use_amp(frequency: int) -> None:
    trace = run(lambda api: two_optimizers(api, None), frequency)
    assert all("scaler_state_dict" in checkpoint["keys"] for checkpoint in trace.checkpoints)


def test_outputs_of_a_model_under_autocast() -> None:
    """In lists, tuples and dicts both sides make float32 of float16."""

    def make(api: Any) -> type:
        class Nested(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(3, 1)

            def forward(self, inputs: torch.Tensor) -> Any:
                half = self.linear(inputs).half()
                return {"list": [half, (half, inputs)], "one": half}

        class Trial(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                self.context = context
                self.model = context.wrap_model(context.autocast_forward_pass(Nested()))
                self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))

            def loss(self, batch: Any) -> torch.Tensor:
                outputs = self.model(batch[0])
                first, (second, _) = outputs["list"]
                assert first.dtype is second.dtype is outputs["one"].dtype is torch.float32
                return ((first + second - batch[1]) ** 2).mean()

        return Trial

    compare(make, max_length=lambda api: api.Batch(5), checkpoint_policy="none")
