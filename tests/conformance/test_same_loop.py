"""Boundaries, epochs and random draws: events, numbers and checkpoints are those of Determined 0.38.1."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.sides import compare
from tests.conformance.trials import EPOCH_LEN, adversarial, basic, drawing

pytest.importorskip("determined", reason="the real determined is not installed; run tox -e conformance")


@dataclasses.dataclass(frozen=True)
class Unit:
    """A training unit of either side, made when the side is known."""

    kind: str
    value: Any

    def __call__(self, api: Any) -> Any:
        return getattr(api, self.kind)(self.value)

    def __repr__(self) -> str:
        return f"{self.kind}({self.value})"


def batch(value: Any) -> Unit:
    return Unit("Batch", value)


def epoch(value: Any) -> Unit:
    return Unit("Epoch", value)


@pytest.mark.parametrize("policy", ["all", "best", "none"])
@pytest.mark.parametrize("reporting", [1, 4, 100])
def test_reports_and_policies(policy: str, reporting: int) -> None:
    """Without a metric to compare, "best" falls back to "all" on both sides."""
    compare(
        basic,
        max_length=batch(13),
        validation_period=batch(5),
        reporting_period=batch(reporting),
        checkpoint_policy=policy,
    )


@pytest.mark.parametrize(
    "fit",
    [
        {"max_length": batch(1)},
        {"max_length": batch(0)},
        {"max_length": epoch(2)},
        {"max_length": epoch(2), "validation_period": epoch(1), "checkpoint_period": epoch(2)},
        {"max_length": epoch(1), "validation_period": batch(4), "checkpoint_period": batch(4)},
        {"max_length": batch(14), "validation_period": epoch(1), "checkpoint_period": batch(5)},
        {"max_length": batch(12), "checkpoint_period": batch(12), "validation_period": batch(7)},
        {"max_length": batch(9), "validation_period": batch([2, 3, 8])},
        {"max_length": batch(9), "checkpoint_period": batch((1, 9)), "validation_period": batch({4})},
        {"max_length": epoch(3), "validation_period": epoch([2]), "checkpoint_period": epoch(range(1, 3))},
        {"max_length": batch(4), "validation_period": batch(0), "checkpoint_period": batch(2)},
        {"max_length": epoch(2), "validation_period": epoch(0)},
        {"max_length": batch(15), "reporting_period": epoch(1)},
        {"max_length": batch(8), "reporting_period": batch([3, 5])},
        {"max_length": batch(8), "validation_period": batch(np.array([2, 5])), "reporting_period": None},
        {"max_length": batch(7), "validation_period": batch(range(0, 100, 3)), "checkpoint_period": batch({2: "x"})},
    ],
    ids=str,
)
def test_lengths_periods_and_schedules(fit: dict[str, Any]) -> None:
    compare(basic, **{"checkpoint_policy": "none", **fit})


@pytest.mark.parametrize("step_zero", [False, True])
@pytest.mark.parametrize("test_mode", [False, True])
def test_test_mode_and_step_zero_validation(step_zero: bool, test_mode: bool) -> None:
    compare(basic, max_length=batch(7), step_zero_validation=step_zero, test_mode=test_mode, checkpoint_policy="all")


@pytest.mark.parametrize("loader", [{"num_workers": 2}, {"shuffle": False}, {"drop_last": True}], ids=str)
def test_ways_of_loading(loader: dict[str, Any]) -> None:
    def make(api: Any) -> type:
        return type("Loading", (basic(api),), loader)

    compare(make, max_length=batch(2 * EPOCH_LEN + 1), validation_period=batch(5), checkpoint_policy="none")


@pytest.mark.parametrize("make", [drawing, adversarial])
def test_draws_and_several_models(make: Any) -> None:
    compare(make, max_length=batch(15), validation_period=batch(4), checkpoint_period=batch(6))


@pytest.mark.parametrize("hook", ["on_training_workload_end", "on_validation_end", "on_checkpoint_upload_end"])
@pytest.mark.parametrize(
    "fit",
    [
        {"validation_period": batch(3), "checkpoint_period": batch(2)},
        {"validation_period": batch(2), "checkpoint_period": batch(2)},
        {"checkpoint_period": batch(4), "reporting_period": batch(3)},
        {"max_length": batch(6), "validation_period": batch(6), "checkpoint_period": batch(6)},
    ],
    ids=str,
)
def test_stopping_on_request(hook: str, fit: dict[str, Any]) -> None:
    def make(api: Any) -> type:
        class Stops(basic(api)):  # type: ignore[misc]
            def build_callbacks(self) -> dict[str, Any]:
                def stop(callback: Any, *args: Any, **kwargs: Any) -> None:
                    self.context.set_stop_requested(True)

                return {"stop": type("Stop", (api.PyTorchCallback,), {hook: stop})()}

        return Stops

    compare(make, **{"max_length": batch(20), "checkpoint_policy": "none", **fit})


def test_stopping_from_within_a_batch() -> None:
    def make(api: Any) -> type:
        class Stops(basic(api)):  # type: ignore[misc]
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                if batch_idx == 4:
                    self.context.set_stop_requested(True)
                return super().train_batch(batch, epoch_idx, batch_idx)

        return Stops

    compare(make, max_length=batch(20), reporting_period=batch(3), checkpoint_policy="none")


def test_the_position_that_a_trial_can_ask_for() -> None:
    def make(api: Any) -> type:
        class Asks(basic(api)):  # type: ignore[misc]
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                context = self.context
                asked = [context.current_train_batch(), context.current_train_epoch(), context.get_initial_batch()]
                asked += [context.is_epoch_start(), context.is_epoch_end()]
                return {**super().train_batch(batch, epoch_idx, batch_idx), **{f"q{i}": a for i, a in enumerate(asked)}}

        return Asks

    compare(make, max_length=epoch(2), checkpoint_policy="none")


def test_gradients_from_before_the_training_are_in_the_first_step() -> None:
    def make(api: Any) -> type:
        class Prepared(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                self.model(torch.ones(1, 3)).sum().backward()

        return Prepared

    compare(make, max_length=batch(3))
