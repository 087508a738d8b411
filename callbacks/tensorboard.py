"""TensorBoard files with Determined's tags."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from det_lightning.adapters.module import require_trial_module
from det_lightning.engine.metrics import scalars_of
from det_lightning.pytorch._tensorboard import TensorBoardOutput


class DeterminedTensorBoard(pl.Callback):
    """Writes TensorBoard files with Determined's tags.

    The tags are ``Determined/<metric>`` for each training batch, counted from 0, and ``Determined/val_<metric>`` for
    each validation, at the number of batches trained before it. A name that begins with ``val`` gets no ``val_``.

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
        if not self._output.enabled:
            return
        first = steps_completed - len(batch_metrics)
        scalars: list[tuple[str, float, int]] = []
        of_batches: set[str] = set()
        for step, metrics in enumerate(batch_metrics, start=first):
            of_batches.update(metrics)
            scalars += _tagged(metrics, step)
        reduced = {name: value for name, value in avg_metrics.items() if name not in of_batches}
        self._output.add_scalars(scalars + _tagged(reduced, steps_completed))

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Write the metrics of a validation."""
        if self._output.enabled:
            named = {name if name.startswith("val") else f"val_{name}": value for name, value in metrics.items()}
            self._output.add_scalars(_tagged(named, steps_completed))


def _tagged(metrics: dict[str, Any], step: int) -> list[tuple[str, float, int]]:
    return [(f"Determined/{name}", value, step) for name, value in scalars_of(metrics).items()]
