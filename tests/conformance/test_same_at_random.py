"""Trials put together at random: whatever is combined, the real one and ours do the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance import sides
from tests.conformance.sides import compare, epoch
from tests.conformance.trials import Basic, callback, make_data, schedule

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
    order: str
    drop_last: bool
    own_generator: bool

    def loader(self, api: Any, samples: int, drop_last: bool = False) -> Any:
        data = make_data(samples)
        size = min(self.batch, self.samples // 2)  # a subset has no more
        generator = torch.Generator().manual_seed(samples) if self.own_generator else None
        if self.order in ORDERS:
            sampler = ORDERS[self.order](samples, generator)
            return api.DataLoader(data, size, sampler=sampler, drop_last=drop_last)
        if self.order == "batches":
            batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), size, drop_last)
            return api.DataLoader(data, batch_sampler=batches, generator=generator)
        shuffle = self.order == "shuffled"
        return api.DataLoader(data, size, shuffle=shuffle, drop_last=drop_last, generator=generator)


@dataclasses.dataclass
class Deed:
    """What a callback does at the ``call``-th call of a hook, counted from 0, or at every call."""

    hook: str
    kind: str
    call: int | None


def callback_that_does(deeds: list[Deed], api: Any, context: Any) -> Any:
    """Return a callback that does the deeds, and keeps the number of calls of each hook as its state."""
    calls = dict.fromkeys(HOOKS, 0)

    def hook_of(name: str) -> Callable[..., None]:
        def method(*args: Any, **kwargs: Any) -> None:
            for deed in deeds:
                if deed.hook == name and deed.call in (None, calls[name]):
                    DEEDS[deed.kind](context, [*args, *kwargs.values()])
            calls[name] += 1

        return method

    return callback(api, state_dict=lambda: {"calls": dict(calls)}, **{name: hook_of(name) for name in HOOKS})


def change_metrics(context: Any, arguments: list[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, dict):
            argument["added"] = 1.5


def slow_down(context: Any, arguments: list[Any]) -> None:
    for optimizer in context.optimizers:
        optimizer.param_groups[0]["lr"] *= 0.9


def leave_gradients(context: Any, arguments: list[Any]) -> None:
    with torch.enable_grad():
        context.models[0](torch.ones(1, 3)).sum().backward()


DEEDS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "torch": lambda context, arguments: torch.rand(2),
    "numpy": lambda context, arguments: np.random.rand(),
    "metrics": change_metrics,
    "rate": slow_down,
    "gradients": leave_gradients,
    "weights": lambda context, arguments: next(context.models[-1].parameters()).data.mul_(0.9),
    "mode": lambda context, arguments: context.models[0].eval(),
    "stop": lambda context, arguments: context.set_stop_requested(True),
    "go on": lambda context, arguments: context.set_stop_requested(False),
}
HOOKS = [hook for hook in sides.HOOKS if hook not in ("on_trial_startup", "on_checkpoint_load_start")]
ORDERS: dict[str, Callable[[int, Any], Any]] = {
    "weighted": lambda n, generator: torch.utils.data.WeightedRandomSampler([*range(1, n + 1)], n, generator=generator),
    "subset": lambda n, generator: torch.utils.data.SubsetRandomSampler(range(0, n, 2), generator=generator),
    "backwards": lambda n, generator: range(n - 1, -1, -1),
}

CALLBACKS = st.lists(
    st.builds(Deed, st.sampled_from(HOOKS), st.sampled_from(sorted(DEEDS)), st.none() | st.integers(0, 2)), max_size=3
)
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
    order=st.sampled_from(["shuffled", "in order", "batches", *ORDERS]),
    drop_last=st.booleans(),
    own_generator=st.booleans(),
)
#: At which call of which method, counted from 0, the trial asks to stop.
STOPS = st.none() | st.tuples(st.sampled_from(["train_batch", "evaluate_batch"]), st.integers(0, 5))
PERIODS = st.integers(0, 8) | st.integers(1, 3).map(epoch) | st.lists(st.integers(1, 9), min_size=1, max_size=3)


def put_together(parts: list[Part], data: Data, stop: tuple[str, int] | None, deeds: list[Deed]) -> type[Basic]:
    """Return a trial whose prediction is the sum of those of its models."""

    class PutTogether(Basic):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.calls = {"train_batch": 0, "evaluate_batch": 0}
            self.models = [context.wrap_model(torch.nn.Linear(3, 1)) for _ in parts]
            self.optimizers: list[Any] = []
            self.schedulers: list[Any] = []
            for part, model in zip(parts, self.models, strict=True):
                plain = OPTIMIZERS[part.optimizer](model.parameters())
                optimizer = context.wrap_optimizer(plain, average_aggregated_gradients=part.average)
                self.optimizers.append(optimizer)
                if part.scheduler is not None:
                    scheduler = SCHEDULERS[part.scheduler](optimizer)
                    self.schedulers.append((part, scheduler))
                    schedule(self, scheduler, part.step_mode, frequency=part.frequency)
            self.spread = context.wrap_reducer(lambda values: max(values) - min(values), name="spread")

        def build_callbacks(self) -> dict[str, Any]:
            return {"does": callback_that_does(deeds, self.api, self.context)}

        def build_training_data_loader(self) -> Any:
            return data.loader(self.api, data.samples, data.drop_last)

        def build_validation_data_loader(self) -> Any:
            return data.loader(self.api, data.validation_samples)

        def loss(self, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            loss = ((sum(model(inputs) for model in self.models) - targets) ** 2).mean()
            self.spread.update(loss.item())
            return loss

        def count(self, method: str) -> None:
            if stop == (method, self.calls[method]):
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


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trial=st.builds(put_together, st.lists(PARTS, min_size=1, max_size=3), DATA, STOPS, CALLBACKS),
    aggregation=st.integers(1, 4),
    fit=st.fixed_dictionaries(
        {
            "max_length": st.integers(1, 11),
            "validation_period": st.none() | PERIODS,
            "checkpoint_period": st.none() | PERIODS,
            "checkpoint_policy": st.sampled_from(["all", "none"]),
            "step_zero_validation": st.booleans(),
        },
        optional={"reporting_period": PERIODS},
    ),
)
def test_random_trials_train_the_same(trial: type[Basic], aggregation: int, fit: dict[str, Any]) -> None:
    compare(trial, init={"aggregation_frequency": aggregation}, **fit)
