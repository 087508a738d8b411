"""Wrapping: how a trial's models, optimizers, schedulers and metrics become known to the run."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from det_lightning import errors
from det_lightning.core.distributed import DistributedContext
from det_lightning.distributed.backend import Backend
from det_lightning.precision.choice import AmpContext
from det_lightning.pytorch._agreement import require_same_model
from det_lightning.pytorch._experimental import PyTorchExperimentalContext
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._reducer import ReducerRegistry

__all__ = ["WrappingContext"]

_T = TypeVar("_T")


class WrappingContext(AmpContext):
    """The part of a trial's context that is used in its ``__init__``; see :class:`PyTorchTrialContext`."""

    def __init__(
        self,
        settings: dict[str, Any],
        distributed: DistributedContext | None,
        backend: Backend | None,
        average_aggregated_gradients: bool,
        loading_only: bool,
    ) -> None:
        super().__init__(settings, distributed, backend, loading_only)
        self.lr_schedulers: list[LRScheduler] = []
        self.reducers = ReducerRegistry(self.distributed.allgather, self.distributed.size)
        self.experimental = PyTorchExperimentalContext(self._use_amp, self.wrap_reducer)
        self._average_by_default = average_aggregated_gradients
        self._averages: dict[torch.optim.Optimizer, bool] = {}

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Place a model for training; use what is returned.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``; or the ranks wrap different models.
        """
        self._require_before_amp("wrap_model")
        if not self._loading_only:
            require_same_model(self.distributed, len(self.models), model)
            if self.whole_models is not None:
                self.whole_models.cast(model)
            model = self.backend.wrap_model(model)
        if self._autocasts:
            model = self.autocast_forward_pass(model)
        elif self.whole_models is not None:
            self.whole_models.surround(model, self.device)
        self.models.append(model)
        return model

    def wrap_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> torch.optim.Optimizer:
        """Register an optimizer; use what is returned.

        Args:
            optimizer: over parameters of wrapped models.
            backward_passes_per_step: number of backward passes per parameter in one batch (used by Horovod).
            fp16_compression: exchange gradients in half precision (used by Horovod); by default as
                ``optimizations.gradient_compression`` of the experiment configuration says.
            average_aggregated_gradients: divide the gradients of an update by the aggregation frequency; by default
                as the context was told.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``, or ``backward_passes_per_step`` below 1.
        """
        self._require_before_amp("wrap_optimizer")
        if backward_passes_per_step < 1:
            raise errors.InvalidExperimentException(
                f"wrap_optimizer(backward_passes_per_step=...) must be at least 1; got {backward_passes_per_step}."
            )
        if fp16_compression is None:
            optimizations = (self._exp_conf or {}).get("optimizations") or {}
            fp16_compression = bool(optimizations.get("gradient_compression"))
        if not self._loading_only:
            optimizer = self.backend.wrap_optimizer(
                optimizer, backward_passes_per_step=backward_passes_per_step, fp16_compression=fp16_compression
            )
        average = self._average_by_default if average_aggregated_gradients is None else average_aggregated_gradients
        self._averages[optimizer] = average
        self.optimizers.append(optimizer)
        return optimizer

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1) -> Any:
        """Register a learning rate scheduler, and return it as it is.

        Args:
            lr_scheduler: its optimizer must be what ``wrap_optimizer`` returned.
            step_mode: when the training loop steps it.
            frequency: step at every ``frequency``-th of those moments.

        Raises:
            InvalidExperimentException: the optimizer was not wrapped, or a ``ReduceLROnPlateau`` is to be stepped
                automatically.
            TypeError: ``step_mode`` is not a ``LRScheduler.StepMode``.
        """
        plateau = isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau and step_mode is not LRScheduler.StepMode.MANUAL_STEP:
            raise errors.InvalidExperimentException(
                f"ReduceLROnPlateau was wrapped with step_mode={step_mode}: its step() needs a metric, which the "
                "training loop does not have. Wrap it with LRScheduler.StepMode.MANUAL_STEP and call "
                "step(metrics[...]) in the on_validation_end of a callback."
            )
        optimizer = getattr(lr_scheduler, "optimizer", None)
        if optimizer is not None and optimizer not in self.optimizers:
            raise errors.InvalidExperimentException(
                f"{type(lr_scheduler).__name__} was given an optimizer ({type(optimizer).__name__}) that was not "
                "wrapped. Build the scheduler from what wrap_optimizer() returned."
            )
        self.lr_schedulers.append(LRScheduler(lr_scheduler, step_mode, frequency))
        return lr_scheduler

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """Register a metric that is computed over all batches and ranks together.

        Args:
            reducer: a function of the list of all values given to ``update()``; a :class:`MetricReducer`; or a
                torchmetrics ``Metric`` or ``MetricCollection``.
            name: the name of the metric; None if the reducer returns a dict of metrics.
            for_training: reduce at the end of training workloads.
            for_validation: reduce at the end of validations.

        Returns:
            What to update: ``reducer`` itself, or for a function an object with the method ``update(value)``.

        Raises:
            AssertionError: the object was wrapped before, or is none of these.
        """
        if isinstance(reducer, torch.nn.Module) and not self._loading_only:
            reducer.to(self.device)  # the state of a torchmetrics metric has to be where the batches are
        return self.reducers.wrap_reducer(reducer, name, for_training, for_validation)

    def reset_reducers(self) -> None:
        """Reset every wrapped reducer; the training loop does so before each workload."""
        self.reducers.reset()

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """Return the metrics of the wrapped reducers, over all ranks; the training loop reports them.

        Raises:
            ValueError, AssertionError: a reducer failed, or its result does not fit its name; names it.
        """
        return self.reducers.reduce(for_training)

    # The single model, optimizer and scheduler of a trial, as in Determined 0.13

    def get_model(self) -> torch.nn.Module:
        """Return the wrapped model of a trial that has one."""
        return _only(self.models, "model")

    def get_optimizer(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer of a trial that has one."""
        return _only(self.optimizers, "optimizer")

    def get_lr_scheduler(self) -> Any:
        """Return the wrapped learning rate scheduler of a trial that has one, None if it has none."""
        return _only(self.lr_schedulers, "learning rate scheduler").scheduler if self.lr_schedulers else None


def _only(wrapped: list[_T], what: str) -> _T:
    if len(wrapped) != 1:
        raise errors.InvalidExperimentException(
            f"get_{what.split()[-1]}() is for trials with exactly one wrapped {what}; this one has {len(wrapped)}. "
            f"Keep what the wrap method returned instead."
        )
    return wrapped[0]
