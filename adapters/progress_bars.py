"""Moving Lightning's progress bars while a step that holds many batches is under way."""

from __future__ import annotations

import time

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar, TQDMProgressBar

_INTERVAL_S = 0.1


class BarRefresh:
    """Draws the progress bars of a trainer at most ten times a second, through their documented hooks."""

    def __init__(self, trainer: pl.Trainer) -> None:
        callbacks: list[pl.Callback] = getattr(trainer, "callbacks")  # noqa: B009 (set by a connector; mypy)
        self._trainer = trainer
        self._bars = [bar for bar in callbacks if isinstance(bar, ProgressBar) and getattr(bar, "is_enabled", True)]
        self.any_drawn = bool(self._bars)
        self._next_s = time.monotonic() + _INTERVAL_S

    def is_due(self) -> bool:
        """Return whether it is time to draw."""
        return time.monotonic() >= self._next_s

    def draw_training(self, batches: int) -> None:
        """Show the number of batches of the epoch that are trained."""
        for bar, shown in self._shown(batches):
            bar.on_train_batch_end(self._trainer, self._trainer.lightning_module, None, None, shown - 1)

    def draw_validation(self, batches: int) -> None:
        """Show the number of batches of the validation that are evaluated."""
        for bar, shown in self._shown(batches):
            bar.on_validation_batch_end(self._trainer, self._trainer.lightning_module, None, None, shown - 1)

    def _shown(self, batches: int) -> list[tuple[ProgressBar, int]]:
        """Return each bar with the number to show: tqdm's draws itself at multiples of its refresh rate only."""
        self._next_s = time.monotonic() + _INTERVAL_S
        rates = [(bar, bar.refresh_rate if isinstance(bar, TQDMProgressBar) else 1) for bar in self._bars]
        return [(bar, batches - batches % rate) for bar, rate in rates if batches >= rate]
