"""Starts, steps and stops the profiler of ``context.set_profiler``, which takes all options of torch's profiler."""

from __future__ import annotations

import torch

from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.module import require_trial_module
from det_lightning.arguments import require


class TorchProfiler(pl.Callback):
    """Runs a ``torch.profiler.profile`` during training, with a step right after each ``train_batch``.

    Args:
        profiler: from ``context.set_profiler``.

    Example:
        >>> import det_lightning as det
        >>> import torch
        >>> from det_lightning.callbacks import TorchProfiler
        >>> with det.pytorch.init() as context:
        ...     context.set_profiler(
        ...         activities=[torch.profiler.ProfilerActivity.CPU],
        ...         schedule=torch.profiler.schedule(wait=1, warmup=1, active=2),
        ...     )
        ...     callback = TorchProfiler(context.profiler)

        Pass it in ``pl.Trainer(callbacks=[callback])``.
    """

    def __init__(self, profiler: torch.profiler.profile) -> None:
        require(hasattr(profiler, "step"), "TorchProfiler()", "a torch.profiler.profile", profiler)
        self._profiler = profiler
        self._runs = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the profiler, and step it after each batch.

        Raises:
            TypeError: the module is not a ``TrialModule``.
        """
        require_trial_module(self, pl_module).trial_run.training.profile(self._profiler.step)
        self._profiler.start()
        self._runs = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the profiler."""
        if self._runs:
            self._runs = False
            self._profiler.stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop the profiler."""
        self.on_train_end(trainer, pl_module)
