"""A progress bar over the whole run of a trial."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar


class TrialProgressBar(TQDMProgressBar):
    """Lightning's bar, for a trial: one line per epoch that stays, with the metrics reported last."""

    def __init__(self) -> None:
        super().__init__(leave=True)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Leave out the version number that Lightning shows."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
