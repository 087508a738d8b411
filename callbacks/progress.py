"""A progress bar over the whole run of a trial."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar

__all__ = ["TrialProgressBar"]


class TrialProgressBar(TQDMProgressBar):
    """Lightning's bar, for a trial: one line per epoch that stays, with the metrics reported last.

    It is drawn when a step of Lightning's ends, at most some ten times a second.
    """

    #: The bar asks the module how far it has come, and not Lightning's data fetcher.
    reads_trial_position = True

    def __init__(self) -> None:
        super().__init__(leave=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show how far into the epoch the trial is."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, trainer.fit_loop.batch_idx)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Leave out the version number that Lightning shows."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
