"""A trial's metrics for any loggers and callbacks of Lightning."""

from __future__ import annotations

from typing import Any

import torch

from det_lightning.adapters import lightning_internals
from det_lightning.adapters.lightning_package import TrainerFn, pl
from det_lightning.core._reports import select_scalars


class LightningReporter:
    """Passes the metrics of a module's trial to a Lightning trainer, with the number of batches as the step.

    A validation metric with the name of a training metric gets a ``val_`` prefix. ``training_names`` come from earlier
    runs.
    """

    def __init__(self, module: pl.LightningModule, base: type[pl.LightningModule], training_names: set[str]) -> None:
        self._module = module
        self._base = base
        self._training_names = training_names
        self._initial: dict[str, float] = {}

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Show and log the averages of a workload."""
        trainer = self._module.trainer
        scalars = select_scalars(avg_metrics)
        self._training_names.update(scalars)
        lightning_internals.show_report(trainer, as_tensors(scalars), scalars)
        self.log_initial()
        self._log(scalars, steps_completed)

    def log_initial(self) -> None:
        """Log the metrics of a validation before the first batch, once the names of training metrics are known.

        A run that ends before the first batch logs the metrics at the end.
        """
        for name in self._initial.keys() - self._training_names:
            self._module.trainer.callback_metrics.pop(f"val_{name}", None)
        if self._initial:
            self._log(self._rename(self._initial), step=0)
            self._initial = {}

    def _log(self, scalars: dict[str, float], step: int) -> None:
        for logger in self._module.trainer.loggers:
            logger.log_metrics({**scalars, "epoch": self._module.trainer.current_epoch}, step=step)
            logger.save()

    def _rename(self, scalars: dict[str, float]) -> dict[str, float]:
        return {f"val_{name}" if name in self._training_names else name: value for name, value in scalars.items()}

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Log the metrics of a validation; only from within Lightning's validation loop."""
        scalars = select_scalars(metrics, leave_out=("batches", "epochs"))
        named = self._rename(scalars)
        if not named:
            return
        trainer = self._module.trainer
        if steps_completed == 0 and not self._training_names and trainer.state.fn is TrainerFn.FITTING:
            # Only the first report tells the names. Loggers get the metrics then, callbacks now, under both names.
            self._initial = scalars
            prefixed = {f"val_{name}": value for name, value in scalars.items()}
            lightning_internals.show_report(trainer, as_tensors(scalars), scalars)
            lightning_internals.publish_metrics(trainer, as_tensors(prefixed))
        elif trainer.state.fn is TrainerFn.FITTING and not trainer.loggers and not self._has_own_log():
            # Lightning's log() takes longer than the validation of a hundred small batches.
            lightning_internals.show_report(trainer, as_tensors(named), named)
        else:
            self._module.log_dict(as_tensors(named), prog_bar=True, on_epoch=True, batch_size=1)

    def _has_own_log(self) -> bool:
        return any(
            pl.utilities.model_helpers.is_overridden(name, self._module, self._base) for name in ("log", "log_dict")
        )


def as_tensors(scalars: dict[str, float]) -> dict[str, torch.Tensor]:
    """Return the scalars as float64 tensors: Lightning would round a Python float to float32."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
