"""How many batches a Lightning step of a trial holds: the data and the flags decide, and no clock."""

from __future__ import annotations

import time
from typing import Any

import pytest

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from tests.adapters.training import trained
from tests.lightning import fit, pl
from tests.trials import EPOCH_LEN, SmallTrial


class SlowTrial(SmallTrial):
    seconds = 0.06

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        return super().train_batch(batch, epoch_idx, batch_idx)


class CountingModule(TrialModule):
    steps = 0

    def training_step(self, dataloader_iter: Any) -> None:
        self.steps += 1
        super().training_step(dataloader_iter)


@pytest.mark.parametrize("seconds", [0.0, 0.06])
@pytest.mark.parametrize(
    ("bars", "steps"),
    [
        ([], 2),  # up to batches 7 and 14, where the epochs end; reports after batches 5 and 10 end no step
        ([pl.callbacks.TQDMProgressBar], 4),  # up to batches 5, 7, 10 and 14
    ],
)
def test_slow_batches_take_equal_steps(seconds: float, bars: list[Any], steps: int) -> None:
    trial_class = type("Trial", (SlowTrial,), {"seconds": seconds})
    module = CountingModule(trial_class, reporting_period=pytorch.Batch(5))
    assert trained(module, max_epochs=2, callbacks=[bar() for bar in bars]).steps == steps


@pytest.mark.slow
@pytest.mark.parametrize("bar_class", [pl.callbacks.TQDMProgressBar, pl.callbacks.RichProgressBar])
def test_a_bar_moves_within_a_step(bar_class: Any) -> None:
    shown: list[int] = []

    class Bar(bar_class):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            shown.append(batch_idx)
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    module = CountingModule(SlowTrial, reporting_period=pytorch.Batch(100))
    fit(module, callbacks=[Bar()])
    assert module.steps == 1
    assert len(shown) > 1
    assert (shown, shown[-1]) == (sorted(shown), EPOCH_LEN - 1)
