"""When learning rate schedulers step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from det_lightning.pytorch import LRScheduler

Mode = LRScheduler.StepMode


def make_scheduler(mode: Any, frequency: int = 1) -> LRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), mode, frequency)


@pytest.mark.parametrize(
    ("mode", "frequency", "aggregation", "steps"),
    [
        (Mode.STEP_EVERY_BATCH, 1, 1, [1, 1, 1, 1, 1, 1, 1, 1]),
        (Mode.STEP_EVERY_BATCH, 3, 1, [0, 0, 1, 0, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_BATCH, 1, 4, [4, 4]),
        (Mode.STEP_EVERY_BATCH, 3, 4, [1, 1]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 1, 4, [1, 1]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 8, 4, [0, 1]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 3, 4, [0, 0]),
        (Mode.STEP_EVERY_EPOCH, 1, 1, [0, 0, 1, 0, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_EPOCH, 2, 1, [0, 0, 0, 0, 0, 1, 0, 0]),
        (Mode.STEP_EVERY_EPOCH, 1, 2, [1, 0, 1, 1]),
        (Mode.STEP_EVERY_EPOCH, 2, 4, [1, 0]),
        (Mode.MANUAL_STEP, 1, 1, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_schedulers_step_by_their_mode_and_frequency(
    mode: LRScheduler.StepMode, frequency: int, aggregation: int, steps: list[int]
) -> None:
    scheduler = make_scheduler(mode, frequency)
    updates = range(aggregation - 1, 8, aggregation)
    assert [scheduler.steps_after(update, 3, aggregation) for update in updates] == steps


@pytest.mark.parametrize("mode", [Mode.STEP_EVERY_BATCH, Mode.STEP_EVERY_OPTIMIZER_STEP])
def test_endless_epochs_step_by_batches_only(mode: LRScheduler.StepMode) -> None:
    assert make_scheduler(mode).steps_after(5, 2**63 - 1, 1) == 1
    assert make_scheduler(Mode.STEP_EVERY_EPOCH).steps_after(5, 2**63 - 1, 1) == 0


def test_unusable_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="frequency of StepLR must be at least 1; got 0"):
        make_scheduler(Mode.STEP_EVERY_BATCH, 0)
    with pytest.raises(TypeError, match="one of STEP_EVERY_EPOCH, STEP_EVERY_BATCH, MANUAL_STEP, STEP_EVERY_OPTIMIZER"):
        make_scheduler("STEP_EVERY_BATCH")
