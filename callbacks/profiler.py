"""Profiling a trial with torch's profiler."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch


class TorchProfiler(pl.Callback):
    """Runs a ``torch.profiler.profile`` over the training and steps it after every batch.

    Args:
        profiler: from ``context.set_profiler``.
    """

    def __init__(self, profiler: torch.profiler.profile) -> None:
        self._profiler = profiler
        self._runs = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start profiling."""
        self._profiler.start()
        self._runs = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Step the profiler."""
        self._profiler.step()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop profiling."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop profiling."""
        self._stop()

    def _stop(self) -> None:
        if self._runs:
            self._runs = False
            self._profiler.stop()
