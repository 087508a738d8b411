"""Trials put together at random: whatever is combined, the real one and ours do the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.sides import as_unit, compare
from tests.conformance.trials import basic, make_data

pytest.importorskip("determined", reason="the real determined is not installed; run tox -e conformance")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "restarts": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
}
CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1),
    "value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01),
}


@dataclasses.dataclass
class Part:
    """A model with its optimizer, which steps on every ``every``-th batch only, and perhaps a scheduler."""

    optimizer: str
    average: bool | None
    clip: str | None
    every: int
    scheduler: str | None
    step_mode: str
    frequency: int


@dataclasses.dataclass
class Data:
    """Training and validation data, and how they are loaded."""

    samples: int
    batch: int
    validation_samples: int
    shuffle: bool
    drop_last: bool
    own_generator: bool

    def loader(self, api: Any, samples: int, drop_last: bool = False) -> Any:
        generator = torch.Generator().manual_seed(samples) if self.own_generator else None
        return api.DataLoader(
            make_data(samples),
            min(self.batch, self.samples),
            shuffle=self.shuffle,
            drop_last=drop_last,
            generator=generator,
        )


@dataclasses.dataclass
class Stop:
    """The trial asks to stop at the ``call``-th call of a method, counted from 0."""

    method: str
    call: int


PARTS = st.builds(
    Part,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    average=st.sampled_from([None, True, False]),
    clip=st.sampled_from([None, *CLIPS]),
    every=st.sampled_from([1, 1, 2]),
    scheduler=st.sampled_from([None, *SCHEDULERS]),
    step_mode=st.sampled_from(["STEP_EVERY_EPOCH", "STEP_EVERY_BATCH", "STEP_EVERY_OPTIMIZER_STEP", "MANUAL_STEP"]),
    frequency=st.integers(1, 3),
)
DATA = st.builds(
    Data,
    samples=st.integers(5, 14),
    batch=st.integers(1, 5),
    validation_samples=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    own_generator=st.booleans(),
)
STOPS = st.none() | st.builds(Stop, st.sampled_from(["train_batch", "evaluate_batch"]), st.integers(0, 5))
PERIODS = (
    st.none()
    | st.tuples(st.just("Batch"), st.integers(0, 8))
    | st.tuples(st.just("Epoch"), st.integers(1, 3))
    | st.tuples(st.just("Batch"), st.lists(st.integers(1, 9), min_size=1, max_size=3))
).map(lambda unit: None if unit is None else list(unit))


def put_together(parts: list[Part], data: Data, stop: Stop | None) -> Callable[[Any], type]:
    """Return the maker of a trial whose prediction is the sum of those of its models."""

    def make(api: Any) -> type:
        class PutTogether(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                self.context = context
                self.calls = {"train_batch": 0, "evaluate_batch": 0}
                self.models = [context.wrap_model(torch.nn.Linear(3, 1)) for _ in parts]
                self.optimizers: list[Any] = []
                self.schedulers: list[Any] = []
                for part, model in zip(parts, self.models, strict=True):
                    self.wrap_rest(part, model)
                self.spread = context.wrap_reducer(lambda values: max(values) - min(values), name="spread")

            def wrap_rest(self, part: Part, model: torch.nn.Module) -> None:
                plain = OPTIMIZERS[part.optimizer](model.parameters())
                optimizer = self.context.wrap_optimizer(plain, average_aggregated_gradients=part.average)
                self.optimizers.append(optimizer)
                if part.scheduler is not None:
                    mode, scheduler = api.LRScheduler.StepMode[part.step_mode], SCHEDULERS[part.scheduler](optimizer)
                    self.schedulers.append((part, self.context.wrap_lr_scheduler(scheduler, mode, part.frequency)))

            def build_training_data_loader(self) -> Any:
                return data.loader(api, data.samples, data.drop_last)

            def build_validation_data_loader(self) -> Any:
                return data.loader(api, data.validation_samples)

            def loss(self, batch: Any) -> torch.Tensor:
                inputs, targets = batch
                loss = ((sum(model(inputs) for model in self.models) - targets) ** 2).mean()
                self.spread.update(loss.item())
                return loss

            def count(self, method: str) -> None:
                if stop == Stop(method, self.calls[method]):
                    self.context.set_stop_requested(True)
                self.calls[method] += 1

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                self.count("train_batch")
                loss = self.loss(batch)
                self.context.backward(loss)
                for part, optimizer in zip(parts, self.optimizers, strict=True):
                    if batch_idx % part.every == 0:
                        self.context.step_optimizer(optimizer, CLIPS[part.clip] if part.clip else None)
                for part, scheduler in self.schedulers:
                    if part.step_mode == "MANUAL_STEP" and batch_idx % 2:
                        scheduler.step()
                return {"loss": loss, "batch": batch_idx}

            def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
                self.count("evaluate_batch")
                return {"validation_loss": self.loss(batch), "batch": batch_idx}

        return PutTogether

    return make


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=st.lists(PARTS, min_size=1, max_size=3),
    data=DATA,
    stop=STOPS,
    aggregation=st.integers(1, 4),
    length=st.integers(1, 11),
    periods=st.fixed_dictionaries({"validation_period": PERIODS, "checkpoint_period": PERIODS}),
    reporting=PERIODS,
    policy=st.sampled_from(["all", "none"]),
    step_zero=st.booleans(),
)
def test_trials_put_together_at_random(
    parts: list[Part],
    data: Data,
    stop: Stop | None,
    aggregation: int,
    length: int,
    periods: dict[str, Any],
    reporting: Any,
    policy: str,
    step_zero: bool,
) -> None:
    units = {**periods, "max_length": ["Batch", length], **({"reporting_period": reporting} if reporting else {})}
    compare(
        put_together(parts, data, stop),
        init={"aggregation_frequency": aggregation},
        checkpoint_policy=policy,
        step_zero_validation=step_zero,
        **{name: as_unit(unit) for name, unit in units.items()},
    )
