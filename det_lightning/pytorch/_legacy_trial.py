"""Adapts legacy trials, with the interface before Determined 0.12.13, to today's interface.

A legacy trial wraps nothing. The trial builds one model and one optimizer, and ``train_batch`` and the evaluation
methods get the model as an argument. ``train_batch`` returns the loss, and the adapter does the backward pass and the
optimizer step.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from det_lightning.escaping import get_logger
from det_lightning.pytorch._data import TorchData
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial

logger = get_logger(__name__)

_BUILDERS = ("build_model", "optimizer")

# In a second run a context holds the parts wrapped by the first run, which must not count as wrapped by the trial.
_adapted: weakref.WeakKeyDictionary[PyTorchTrialContext, weakref.ref[PyTorchTrial]] = weakref.WeakKeyDictionary()


class LegacyTrialAdapter(PyTorchTrial):
    """Gives the legacy trial ``trial`` today's interface; ``context`` has wrapped the model and the optimizer."""

    def __init__(self, context: PyTorchTrialContext, trial: PyTorchTrial) -> None:
        self.trial: Any = trial
        self._context = context
        self._model = context.get_model()
        self._optimizer = context.get_optimizer()

    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]:
        """Let the trial compute the loss, then do the backward pass and the optimizer step."""
        metrics = self.trial.train_batch(batch=batch, model=self._model, epoch_idx=epoch_idx, batch_idx=batch_idx)
        loss: Any = metrics.get("loss") if isinstance(metrics, dict) else metrics
        self._context.backward(loss)
        self._context.step_optimizer(self._optimizer)
        return metrics  # type: ignore[no-any-return]

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> Any:
        return self.trial.evaluate_batch(batch=batch, model=self._model)

    def evaluate_full_dataset(self, data_loader: torch.utils.data.DataLoader[Any]) -> Any:
        return self.trial.evaluate_full_dataset(data_loader=data_loader, model=self._model)

    def build_training_data_loader(self) -> Any:
        return self.trial.build_training_data_loader()

    def build_validation_data_loader(self) -> Any:
        return self.trial.build_validation_data_loader()

    def build_callbacks(self) -> Any:
        return self.trial.build_callbacks()

    def evaluation_reducer(self) -> Any:
        return self.trial.evaluation_reducer()

    def get_batch_length(self, batch: Any) -> Any:
        return self.trial.get_batch_length(batch)


def is_legacy_trial(trial: type[PyTorchTrial] | PyTorchTrial) -> bool:
    """Return whether a trial, or a class of trials, has the interface before Determined 0.12.13.

    A legacy trial has ``build_model`` and ``optimizer``, as any trial may, and a ``train_batch`` with a ``model``.
    """
    trial_class = trial if isinstance(trial, type) else type(trial)
    if _find_missing_builders(trial_class):
        return False
    parameters = _get_parameters(trial_class)
    return "model" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def adapt_legacy_trial(trial: PyTorchTrial, context: PyTorchTrialContext) -> PyTorchTrial:
    """Return an adapter for a legacy trial, with its model and optimizer wrapped; return any other trial unchanged.

    A trial that wraps something is no legacy trial. A second run uses the model and optimizer of the first run.
    """
    if not is_legacy_trial(trial):
        return trial
    adapted = _adapted.get(context)
    if adapted is None or adapted() is not trial:
        if context.models or context.optimizers:
            return trial
        logger.info("%s has the interface before Determined 0.12.13; it runs adapted.", type(trial).__name__)
        _wrap_parts(trial, context)
        _adapted[context] = weakref.ref(trial)
    return LegacyTrialAdapter(context, trial)


def original_trial(trial: PyTorchTrial) -> PyTorchTrial:
    """Return the user's trial: the trial inside an adapter, or ``trial``."""
    return trial.trial if isinstance(trial, LegacyTrialAdapter) else trial


def interface_mistakes(trial: PyTorchTrial) -> list[str]:
    """Return a list with the mistake of a trial that takes a ``model`` but fits neither interface; else empty."""
    if isinstance(trial, LegacyTrialAdapter):
        return []
    parameter = _get_parameters(type(trial)).get("model")
    if parameter is None or parameter.default is not parameter.empty:
        return []
    name = type(trial).__name__
    missing = [f"{builder}()" for builder in _find_missing_builders(type(trial))]
    found = f"{name} does not define {' and '.join(missing)}" if missing else "something is wrapped already"
    return [
        f"{name}.train_batch() takes a model, as before Determined 0.12.13; such a trial defines build_model() and "
        f"optimizer(model) and wraps nothing, but {found}. Either define both methods, or wrap in __init__ and remove "
        "the parameter"
    ]


def _find_missing_builders(trial_class: type[PyTorchTrial]) -> list[str]:
    return [name for name in _BUILDERS if not callable(getattr(trial_class, name, None))]


def _get_parameters(trial_class: type[PyTorchTrial]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(trial_class.train_batch).parameters
    except ValueError:  # compiled code may have no signature
        return {}


def _wrap_parts(trial: Any, context: PyTorchTrialContext) -> None:
    model = context.wrap_model(trial.build_model())
    optimizer = context.wrap_optimizer(trial.optimizer(model))
    create_lr_scheduler = getattr(trial, "create_lr_scheduler", None)
    scheduler = None if create_lr_scheduler is None else create_lr_scheduler(optimizer)
    if scheduler is not None:
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"{type(trial).__name__}.create_lr_scheduler() must return None or a pytorch.LRScheduler, "
                "such as LRScheduler(scheduler, step_mode=LRScheduler.StepMode.STEP_EVERY_EPOCH); got a "
                f"{type(scheduler).__name__}."
            )
        context.wrap_lr_scheduler(scheduler.scheduler, scheduler.step_mode, scheduler.frequency)
    level = context.settings.section("optimizations").get("mixed_precision") or "O0"
    if level != "O0":
        context.configure_apex_amp(model, optimizer, opt_level=level)
