"""A progress bar over the whole run of a trial."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm


class TrialProgressBar(TQDMProgressBar):
    """Lightning's bar for a trial, on stderr: one line per epoch, which stays, with the metrics reported last."""

    def __init__(self) -> None:
        super().__init__(leave=True)

    def init_train_tqdm(self) -> Tqdm:
        with contextlib.redirect_stdout(sys.stderr):
            return super().init_train_tqdm()

    def init_validation_tqdm(self) -> Tqdm:
        with contextlib.redirect_stdout(sys.stderr):
            return super().init_validation_tqdm()

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Leave out the version number that Lightning shows."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
