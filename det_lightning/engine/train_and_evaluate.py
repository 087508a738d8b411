"""Calls the methods of a trial and its callbacks in training and validation, and names mistakes in them."""

from __future__ import annotations

import functools
import inspect
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from det_lightning import errors
from det_lightning.core._task import is_try
from det_lightning.distributed.backend import list_parameters
from det_lightning.engine.metrics import MetricWindow, to_numpy
from det_lightning.escaping import get_logger
from det_lightning.pytorch._callback import PyTorchCallback
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import ExternalStateTrial, PyTorchTrial, interface_mistakes
from det_lightning.pytorch._wrapped_parts import UpdateHooks

logger = get_logger(__name__)

_REPLACED = {
    "on_checkpoint_end": "on_checkpoint_write_end",
    "on_before_optimizer_step": "step_optimizer(clip_grads=...)",
    "on_validation_step_start": "on_validation_start",
    "on_validation_step_end": "on_validation_end",
}


def overrides(instance: object, base: type, method: str) -> bool:
    """Return whether ``instance`` replaces the ``method`` of ``base``, in the class or as an attribute set later."""
    found = getattr(instance, method)
    return getattr(found, "__func__", found) is not getattr(base, method)


def find_overridden(instance: object, base: type, methods: Iterable[str]) -> list[str]:
    """Return those ``methods`` of ``base`` that ``instance`` replaces."""
    return [method for method in methods if overrides(instance, base, method)]


class TrialEvents:
    """Passes the events of a run to a trial's callbacks, a dict of ``PyTorchCallback`` by name."""

    def __init__(self, callbacks: dict[str, PyTorchCallback]) -> None:
        if not isinstance(callbacks, dict):
            raise TypeError(f"build_callbacks() must return a dict of callbacks by name; got {callbacks!r}.")
        wrong = {name: c for name, c in callbacks.items() if not isinstance(c, PyTorchCallback)}
        if wrong:
            raise TypeError(f"build_callbacks() must return PyTorchCallback objects of det_lightning; got {wrong}.")
        self.callbacks = callbacks
        self._epoch_starts = [
            (callback, bool(inspect.signature(callback.on_training_epoch_start).parameters))
            for callback in callbacks.values()
        ]
        wants_written = self.find_overrides("on_checkpoint_end") or self.find_overrides("on_checkpoint_write_end")
        #: Called with the directory of a written checkpoint; None if no callback looks.
        self.report_written = self._report_written if wants_written else None
        self._warn_of_old_spellings()

    def _warn_of_old_spellings(self) -> None:
        for name, callback in self.callbacks.items():
            for old, new in _REPLACED.items():
                if overrides(callback, PyTorchCallback, old):
                    warnings.warn(
                        f"Callback {name!r} overrides {old}, which is deprecated; use {new} instead.",
                        FutureWarning,
                        stacklevel=2,
                    )

    def find_overrides(self, method: str) -> list[Any]:
        """Return the bound ``method`` of each callback that overrides it."""
        callbacks = self.callbacks.values()
        return [getattr(one, method) for one in callbacks if overrides(one, PyTorchCallback, method)]

    def attach(self, hooks: UpdateHooks) -> None:
        """Register each ``on_before_optimizer_step``, called with an optimizer's parameters as in Determined 0.13."""
        for method in self.find_overrides("on_before_optimizer_step"):
            hooks.before_step.append(functools.partial(_call_with_parameters, method))

    def emit(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call ``method`` of every callback."""
        for callback in self.callbacks.values():
            getattr(callback, method)(*args, **kwargs)

    def _report_written(self, directory: pathlib.Path) -> None:
        """Call each callback's ``on_checkpoint_write_end``, after ``on_checkpoint_end``, the older name."""
        for callback in self.callbacks.values():
            callback.on_checkpoint_end(str(directory))
            callback.on_checkpoint_write_end(str(directory))

    def start_epoch(self, epoch_idx: int) -> None:
        """Call ``on_training_epoch_start``, also in the old form without an argument."""
        for callback, takes_epoch in self._epoch_starts:
            if takes_epoch:
                callback.on_training_epoch_start(epoch_idx)
            else:
                logger.warning(
                    "%s.on_training_epoch_start() does not take epoch_idx; add the argument.", type(callback).__name__
                )
                callback.on_training_epoch_start()  # type: ignore[call-arg]


def _call_with_parameters(method: Callable[[Any], Any], optimizer: torch.optim.Optimizer) -> None:
    method(list_parameters(optimizer))


# Of a validation in a smoke run, which leaves out the rest.
_MOST_TRIED = 100


class Training:
    """Trains a trial batch by batch; collects the metrics in ``window``.

    ``original`` is the user's trial, which ``trial`` may adapt.
    """

    def __init__(
        self,
        trial: PyTorchTrial,
        original: PyTorchTrial,
        context: PyTorchTrialContext,
        keeps_latest: bool = False,
    ) -> None:
        self._trial = trial
        self._context = context
        self._counts_records = _counts_records(original)
        self._profiled_train_batch: Callable[..., Any] | None = None
        self.window = MetricWindow(keeps_latest)

    def profile(self, step: Callable[[], Any]) -> None:
        """Call ``step`` right after each ``train_batch``."""

        def train_batch(**arguments: Any) -> Any:
            metrics = self._trial.train_batch(**arguments)
            step()
            return metrics

        self._profiled_train_batch = train_batch

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> None:
        """Train on a batch on the device; the indices count from 0."""
        context = self._context
        precision = context.precision
        if precision.path.exchanges:
            precision.path.begin_batch(context.is_update_batch())
        call_trial = self._profiled_train_batch or self._trial.train_batch
        metrics: Any = call_trial(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
        if precision.scales_losses:
            precision.scaling.end_batch()
        if type(metrics) is not dict:
            metrics = self._to_mapping(metrics, batch_idx)
        if context.lr_schedulers:
            self._step_lr_schedulers(batch_idx)
        self.window.add(metrics)
        if self._counts_records:
            self._trial.get_batch_length(batch)

    def _to_mapping(self, metrics: Any, batch_idx: int) -> Any:
        if isinstance(metrics, torch.Tensor):
            return {"loss": metrics}
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"{type(self._trial).__name__}.train_batch() must return a dict of metrics or one tensor; got "
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


def _counts_records(trial: PyTorchTrial) -> bool:
    """Return whether a trial overrides ``get_batch_length``, which Determined calls with each batch."""
    return overrides(trial, PyTorchTrial, "get_batch_length")


class Evaluation:
    """Evaluates a trial, one validation after another: ``by_batch``, or the full dataset into ``full_metrics``.

    ``test_mode`` is that of a schedule: True evaluates a single batch, and a larger number cuts long validations off.
    """

    def __init__(
        self,
        trial: PyTorchTrial,
        original: PyTorchTrial,
        context: PyTorchTrialContext,
        test_mode: int = False,
        keeps_latest: bool = False,
    ) -> None:
        self.by_batch = overrides(original, PyTorchTrial, "evaluate_batch")
        self._trial_name = type(original).__name__
        self._trial = trial
        self._context = context
        self._single_batch = test_mode == 1
        self._most_batches = _MOST_TRIED if test_mode > 1 and is_try() else None
        #: Whether the current validation has more batches than a smoke run evaluates.
        self.is_cut = False
        self._takes_batch_idx = takes_batch_idx(trial.evaluate_batch)
        self.window = MetricWindow(keeps_latest)
        self._counts_records = _counts_records(original)
        self._names: set[str] | None = None
        self.full_metrics: dict[str, Any] = {}

    def begin(self) -> None:
        """Forget the previous validation."""
        self.window.clear()
        self.is_cut = False
        self._names = None

    @property
    def batches_evaluated(self) -> int:
        """Number of batches evaluated on this rank in the current validation."""
        return len(self.window)

    def evaluate(self, batches: Iterator[Any], yields: Callable[[], bool] | None = None) -> bool:
        """Evaluate batches on the device until the end of the data; return whether the validation is over.

        ``yields``, if given, is called after each batch; True ends the call before the end of the data.
        """
        with self._context.distributed.in_batches():
            return self._evaluate(batches, yields)

    def _evaluate(self, batches: Iterator[Any], yields: Callable[[], bool] | None) -> bool:
        trial: Any = self._trial  # takes batch_idx, or does not
        for index, batch in enumerate(batches, start=len(self.window)):
            if index == self._most_batches:
                self.is_cut = True
                return True
            if index == 0 or self._counts_records:
                # Determined counts the records of every batch, and so refuses batches of unknown types.
                trial.get_batch_length(batch)
            if self._takes_batch_idx:
                metrics = trial.evaluate_batch(batch=batch, batch_idx=index)
            else:
                metrics = trial.evaluate_batch(batch=batch)
            if type(metrics) is not dict or metrics.keys() != self._names:
                self._check(metrics, index)
            self.window.add(metrics)
            if self._single_batch:
                return True
            if yields is not None and yields():
                return False
        return True

    def _check(self, metrics: Any, index: int) -> None:
        """Raise an error unless the metrics of a batch are a dict with the same names as before."""
        if not isinstance(metrics, dict):
            raise TypeError(
                f"{self._trial_name}.evaluate_batch() must return a dict of metrics; got {metrics!r} for validation "
                f"batch {index}."
            )
        if self._names is None:
            self._names = set(metrics)
        elif metrics.keys() != self._names:
            raise ValueError(
                f"evaluate_batch() must return the same metrics for every batch; got {sorted(metrics)} for validation "
                f"batch {index}, and {sorted(self._names)} for the batches before."
            )

    def evaluate_full_dataset(self, data_loader: Any) -> None:
        """Evaluate all of the data on the chief."""
        self.full_metrics = {}
        if self._context.distributed.rank == 0:
            metrics = self._trial.evaluate_full_dataset(data_loader=data_loader)
            if not isinstance(metrics, dict):
                raise TypeError(
                    f"{self._trial_name}.evaluate_full_dataset() must return a dict of metrics; got {metrics!r}."
                )
            self.full_metrics = to_numpy(metrics)

    def close(self) -> list[dict[str, Any]]:
        """Return the metrics of each batch of this rank; raise a RuntimeError if a lone rank has none."""
        with self._context.distributed.in_batches():  # a GPU may wait for other ranks
            batches = self.window.close()
        if not batches and self._context.distributed.size == 1:
            raise RuntimeError("The validation loader is empty. See build_validation_data_loader().")
        return batches


def takes_batch_idx(evaluate_batch: Callable[..., Any]) -> bool:
    """Return whether to pass ``batch_idx``: a parameter has that name, or follows ``self`` and the batch.

    As in Determined, keyword-only parameters do not count, and for a decorated function the parameters of the decorator
    do. A ``batch_idx`` without a default is passed in any case.
    """
    specification = inspect.getfullargspec(evaluate_batch)
    if "batch_idx" in specification.args or len(specification.args) > 2:
        return True
    follows = specification.varkw is not None
    named = inspect.signature(evaluate_batch, follow_wrapped=follows).parameters.get("batch_idx")
    return named is not None and named.default is named.empty


def require_trainable(trial: PyTorchTrial, original: PyTorchTrial, context: PyTorchTrialContext) -> None:
    """Raise an InvalidExperimentException naming every mistake that prevents training."""
    further = [] if trial is original else ["model"]  # of a legacy trial
    arguments = ["batch", "epoch_idx", "batch_idx", *further]
    of_training = interface_mistakes(trial) or _find_call_mistakes(original, "train_batch", arguments)
    of_evaluation = _find_evaluation_mistakes(original, further)
    mistakes = [*of_training, *_find_wrapping_mistakes(original, context), *of_evaluation]
    if mistakes:
        raise errors.InvalidExperimentException("; ".join(mistakes) + ".")


def _find_wrapping_mistakes(trial: PyTorchTrial, context: PyTorchTrialContext) -> Iterator[str]:
    if isinstance(trial, ExternalStateTrial):
        return
    name = type(trial).__name__
    if not context.models:
        yield f"{name} has no wrapped model; pass each model through context.wrap_model() in __init__"
    if not context.optimizers:
        yield f"{name} has no wrapped optimizer; pass each optimizer through context.wrap_optimizer() in __init__"


def _find_evaluation_mistakes(trial: PyTorchTrial, further: list[str]) -> list[str]:
    arguments = {"evaluate_batch": ["batch"], "evaluate_full_dataset": ["data_loader"]}
    overridden = find_overridden(trial, PyTorchTrial, arguments)
    if len(overridden) != 1:
        return [
            f"{type(trial).__name__} must override exactly one of evaluate_batch() and evaluate_full_dataset(); it "
            f"overrides {' and '.join(overridden) or 'neither'}"
        ]
    (method,) = overridden
    if method == "evaluate_batch" and not further and takes_batch_idx(trial.evaluate_batch):
        further = ["batch_idx"]
    return _find_call_mistakes(trial, method, [*arguments[method], *further])


def _find_call_mistakes(trial: PyTorchTrial, method: str, arguments: Sequence[str]) -> list[str]:
    """Return why a user's method cannot be called with these keywords."""
    try:
        # A wrapper may change arguments before the call.
        signature = inspect.signature(getattr(trial, method), follow_wrapped=False)
    except ValueError:  # compiled code may have no signature
        return []
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as e:
        return [
            f"{type(trial).__name__}.{method}{signature} cannot be called: {e}; its arguments are passed by name, "
            f"as {', '.join(arguments)}"
        ]
    return []
