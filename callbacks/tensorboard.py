"""TensorBoard files with Determined's tags."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from det_lightning.adapters.module import require_trial_module
from det_lightning.core._tensorboard import TensorBoardOutput


class DeterminedTensorBoard(pl.Callback):
    """Writes TensorBoard files with Determined's tags; see ``TensorBoardOutput``.

    Args:
        output: where to write; see ``context.tensorboard``.
    """

    def __init__(self, output: TensorBoardOutput) -> None:
        self._output = output

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Subscribe to the metrics of the module.

        Raises:
            TypeError: the module is not a :class:`TrialModule`.
        """
        require_trial_module(self, pl_module).reporters.append(self)

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Write the metrics of each batch, and those of reducers."""
        if self._output.enabled:
            self._output.add_training(steps_completed, avg_metrics, batch_metrics)

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Write the metrics of a validation."""
        if self._output.enabled:
            self._output.add_validation(steps_completed, metrics)
