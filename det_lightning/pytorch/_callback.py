"""``PyTorchCallback``, the callback interface of a trial, and the callbacks and functions of older releases.

Change here: a hook is a method of the interface, which ``engine/run.py`` and ``engine/checkpointing.py`` call;
``testing/recorder.py`` and ``porting/to_lightning/hooks.py`` list the hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from det_lightning.arguments import require


class PyTorchCallback:
    """Code that runs at the events of a run. Override methods, and return the callback from ``build_callbacks``.

    A callback that changes attributes must also override :meth:`state_dict` and :meth:`load_state_dict`, so that the
    attributes survive a checkpoint. Each rank has a copy. A method runs on all ranks unless documented to run on the
    chief (rank 0).

    Example:
        >>> from det_lightning.pytorch import PyTorchCallback
        >>> class Best(PyTorchCallback):
        ...     def __init__(self):
        ...         self.best = float("inf")
        ...     def on_validation_end(self, metrics):
        ...         self.best = min(self.best, metrics["validation_loss"])
        ...     def state_dict(self):
        ...         return {"best": self.best}
        ...     def load_state_dict(self, state_dict):
        ...         self.best = state_dict["best"]

        The trial's ``build_callbacks`` returns ``{"best": Best()}``.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Run before the data loaders are built.

        Args:
            first_batch_idx: index of the first batch of this run.
            checkpoint_uuid: the checkpoint to resume from, or None.
        """

    def on_trial_shutdown(self) -> None:
        """Run last, even after an exception."""

    def on_training_start(self) -> None:
        """Run before the first batch, after a checkpoint, if any, is loaded."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before the first batch of epoch ``epoch_idx`` (counted from 0)."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Run after the last batch of epoch ``epoch_idx`` (counted from 0)."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Run at each boundary (report, validation, checkpoint, end) with the metrics since the previous boundary.

        Args:
            avg_metrics: mean of each metric over the batches of the workload, plus ``batches`` and ``epochs``.
            batch_metrics: the metrics of each batch, as numpy values.
        """

    def on_validation_start(self) -> None:
        """Run before a validation."""

    def on_validation_epoch_start(self) -> None:
        """Run before the first validation batch (not with ``evaluate_full_dataset``)."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Run after the last validation batch, with this rank's metrics of every batch."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Run after a validation with the reduced metrics; changes to ``metrics`` are reported."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before a checkpoint is applied; ``checkpoint`` is the content of ``state_dict.pth``, and mutable."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before a checkpoint is written; ``checkpoint`` is the content of ``state_dict.pth``, and mutable."""

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Run on the chief when a checkpoint's files are written. Deprecated: use :meth:`on_checkpoint_write_end`."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Run on the chief when a checkpoint's files are written; files added here become part of the checkpoint."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Run on all ranks when checkpoint ``uuid`` is complete in the storage."""

    def on_before_optimizer_step(self, parameters: Iterable[Any]) -> None:
        """Run before each optimizer step. From Determined 0.13; prefer ``step_optimizer(clip_grads=...)``."""

    def on_validation_step_start(self) -> None:
        """Run before a validation. From Determined 0.13; prefer :meth:`on_validation_start`."""

    def on_validation_step_end(self, metrics: dict[str, Any]) -> None:
        """Run after a validation. From Determined 0.13; prefer :meth:`on_validation_end`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the picklable values that must survive a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned when the checkpoint was written."""


class ClipGradsL2Norm(PyTorchCallback):
    """Scales an optimizer's gradients before each step to limit the norm.

    For trials of old releases; today's trials pass ``clip_grads`` to ``context.step_optimizer()``.

    Args:
        clip_value: the largest L2 norm of all gradients of the optimizer together.

    Example:
        >>> import torch
        >>> from det_lightning.pytorch import ClipGradsL2Norm
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> ClipGradsL2Norm(1.0).on_before_optimizer_step([weight])
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """

    def __init__(self, clip_value: float) -> None:
        self._clip_value = clip_value

    def on_before_optimizer_step(self, parameters: Iterable[Any]) -> None:
        """Scale the gradients of ``parameters`` in place."""
        torch.nn.utils.clip_grad_norm_(parameters, self._clip_value)


class ClipGradsL2Value(PyTorchCallback):
    """Limits every element of an optimizer's gradients before each step.

    For trials of old releases; today's trials pass ``clip_grads`` to ``context.step_optimizer()``.

    Args:
        clip_value: the largest absolute value of an element.

    Example:
        >>> import torch
        >>> from det_lightning.pytorch import ClipGradsL2Value
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([0.5, -4.0])
        >>> ClipGradsL2Value(1.0).on_before_optimizer_step([weight])
        >>> weight.grad
        tensor([ 0.5000, -1.0000])
    """

    def __init__(self, clip_value: float) -> None:
        self._clip_value = clip_value

    def on_before_optimizer_step(self, parameters: Iterable[Any]) -> None:
        """Limit the gradients of ``parameters`` in place."""
        torch.nn.utils.clip_grad_value_(parameters, self._clip_value)


def reset_parameters(model: torch.nn.Module) -> None:
    """Draw new weights for a model: call ``reset_parameters()`` of each module with such a method, inner modules first.

    For trials of old releases: torch already draws a module's weights when the module is created.

    Example:
        >>> import torch
        >>> from det_lightning.pytorch import reset_parameters
        >>> model = torch.nn.Linear(2, 1)
        >>> before = model.weight.clone()
        >>> reset_parameters(model)
        >>> torch.equal(model.weight, before)
        False
    """
    require(isinstance(model, torch.nn.Module), "reset_parameters()", "a torch.nn.Module", model)

    def reset(module: Any) -> None:
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()

    model.apply(reset)
