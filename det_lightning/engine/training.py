"""Training a trial on one batch after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from det_lightning.engine.metrics import MetricWindow
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial


class Training:
    """Trains a trial batch by batch; collects the metrics in ``window``.

    Args:
        trial: the trial.
        context: its context.
        count_records: called with each trained batch, if given.
    """

    def __init__(
        self, trial: PyTorchTrial, context: PyTorchTrialContext, count_records: Callable[[Any], Any] | None
    ) -> None:
        self._trial = trial
        self._context = context
        self._count_records = count_records
        self._profiled_train_batch: Callable[..., Any] | None = None
        self.window = MetricWindow()

    def profile(self, step: Callable[[], Any]) -> None:
        """Call ``step`` right after each ``train_batch``."""

        def train_batch(**arguments: Any) -> Any:
            metrics = self._trial.train_batch(**arguments)
            step()
            return metrics

        self._profiled_train_batch = train_batch

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> None:
        """Train on a batch that is already on the device; the indices count from 0.

        Raises:
            TypeError: the trial's ``train_batch`` returned neither a dict nor a tensor.
        """
        context = self._context
        precision = context.precision
        if precision.path.exchanges:
            precision.path.begin_batch(context.is_update_batch())
        call_trial = self._profiled_train_batch or self._trial.train_batch
        metrics: Any = call_trial(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
        if precision.scales_losses:
            precision.scaling.end_batch()
        if type(metrics) is not dict:
            metrics = self._as_mapping(metrics, batch_idx)
        if context.lr_schedulers:
            self._step_lr_schedulers(batch_idx)
        self.window.add(metrics)
        if self._count_records is not None:
            self._count_records(batch)

    def _as_mapping(self, metrics: Any, batch_idx: int) -> Any:
        """Return the metrics that ``train_batch`` returned for a batch; a tensor alone is the loss."""
        if isinstance(metrics, torch.Tensor):
            return {"loss": metrics}
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"{type(self._trial).__name__}.train_batch() must return a dict of metrics or one tensor; it returned "
                f"{metrics!r} for batch {batch_idx}."
            )
        return metrics

    def _step_lr_schedulers(self, batch_idx: int) -> None:
        context = self._context
        if not context.is_update_batch():
            return
        epoch_len = context.position.epoch_length()
        for scheduler in context.lr_schedulers:
            for _ in range(scheduler.steps_after(batch_idx, epoch_len, context.aggregation_frequency)):
                scheduler.step()
