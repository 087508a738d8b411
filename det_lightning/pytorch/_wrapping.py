"""What a trial has wrapped: its models, optimizers and learning rate schedulers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from det_lightning import errors
from det_lightning.core._distributed import DistributedContext
from det_lightning.distributed.backend import Backend
from det_lightning.precision import ChosenPrecision
from det_lightning.pytorch._agreement import require_same_counts, require_same_model
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._settings import TrialSettings

_T = TypeVar("_T")


class WrappedParts:
    """Models, optimizers and learning rate schedulers, made ready for training as they are wrapped.

    Args:
        distributed: the processes of the run, which must wrap the same models.
        backend: what to train on; None leaves everything on the device where the trial makes it.
        precision: what models compute in.
        settings: of the trial.

    Attributes:
        models, optimizers, lr_schedulers: what the trial wrapped, in that order.
        averages: for each optimizer, whether aggregated gradients are divided by the number of their batches.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        backend: Backend | None,
        precision: ChosenPrecision,
        settings: TrialSettings,
    ) -> None:
        self._distributed = distributed
        self._backend = backend
        self._precision = precision
        self._settings = settings
        self.models = precision.models
        self.optimizers = precision.optimizers
        self.lr_schedulers: list[LRScheduler] = []
        self.averages: dict[torch.optim.Optimizer, bool] = {}

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make a model ready for training, on its device; use what is returned.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``; or the ranks wrap different models.
        """
        self._precision.require_no_levels("wrap_model")
        if self._backend is not None:
            require_same_model(self._distributed, len(self.models), model)
            self._precision.cast(model)
            model = self._backend.placement.wrap_model(model)
        model = self._precision.surround(model)
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
                as for the whole context.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``, or ``backward_passes_per_step`` below 1.
        """
        self._precision.require_no_levels("wrap_optimizer")
        if backward_passes_per_step < 1:
            raise errors.InvalidExperimentException(
                f"wrap_optimizer(backward_passes_per_step=...) must be at least 1; got {backward_passes_per_step}."
            )
        if fp16_compression is None:
            fp16_compression = self._settings.compresses_gradients()
        if average_aggregated_gradients is None:
            average_aggregated_gradients = self._settings.average_aggregated_gradients
        if self._backend is not None:
            optimizer = self._backend.placement.wrap_optimizer(
                optimizer, backward_passes_per_step=backward_passes_per_step, fp16_compression=fp16_compression
            )
        self.averages[optimizer] = average_aggregated_gradients
        self.optimizers.append(optimizer)
        return optimizer

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1) -> Any:
        """Register a learning rate scheduler, and return it.

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

    def require_same_on_all_ranks(self) -> None:
        """Raise, on every rank, if the ranks have wrapped different numbers of parts; all ranks must call it."""
        require_same_counts(self._distributed, len(self.models), len(self.optimizers), len(self.lr_schedulers))

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
