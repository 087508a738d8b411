"""A progress bar over the whole run of a trial."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from det_lightning.adapters.lightning_package import pl


class TrialProgressBar(pl.callbacks.TQDMProgressBar):
    """Lightning's progress bar for a trial, on stderr: one lasting line per epoch, with the latest reported metrics."""

    def __init__(self) -> None:
        super().__init__(leave=True)

    def init_train_tqdm(self) -> pl.callbacks.progress.tqdm_progress.Tqdm:
        """Return Lightning's bar of an epoch, on stderr."""
        with contextlib.redirect_stdout(sys.stderr):
            return super().init_train_tqdm()

    def init_validation_tqdm(self) -> pl.callbacks.progress.tqdm_progress.Tqdm:
        """Return Lightning's bar of a validation, on stderr."""
        with contextlib.redirect_stdout(sys.stderr):
            return super().init_validation_tqdm()

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return Lightning's metrics for the bar, without the version number."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
