"""Evaluating the validation data: batch by batch on every rank, or all of it on the chief."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from det_lightning.engine.events import overrides
from det_lightning.engine.metrics import MetricWindow, to_numpy
from det_lightning.pytorch._legacy_trial import original_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial


class Evaluation:
    """Evaluates a trial, one validation after another: ``by_batch``, or the full dataset into ``full_metrics``."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext, single_batch: bool) -> None:
        self.by_batch = overrides(original_trial(trial), PyTorchTrial, "evaluate_batch")
        self._trial_name = type(original_trial(trial)).__name__
        self._trial = trial
        self._context = context
        self._single_batch = single_batch
        self._takes_batch_idx = takes_batch_idx(trial.evaluate_batch)
        self.window = MetricWindow()
        #: Numbers of records in the batches of the current validation, if they are counted.
        self.lengths: list[Any] = []
        self._length_of: Callable[[Any], Any] | None = None
        self._names: set[str] | None = None
        self.full_metrics: dict[str, Any] = {}

    def begin(self, length_of: Callable[[Any], Any] | None = None) -> None:
        """Forget the previous validation; ``length_of`` is called with each batch of this one, for ``lengths``."""
        self.window.clear()
        self.lengths = []
        self._length_of = length_of
        self._names = None

    @property
    def batches_evaluated(self) -> int:
        """Number of batches that this rank has evaluated in the current validation."""
        return len(self.window)

    def evaluate(self, batches: Iterator[Any], yields: Callable[[], bool] | None = None) -> bool:
        """Evaluate batches, which are on the device, until they end; return whether the validation is over.

        ``yields``, if given, is called after each batch; if it returns True, this returns before they end.
        """
        trial: Any = self._trial  # takes batch_idx, or does not
        length_of = self._length_of
        for index, batch in enumerate(batches, start=len(self.window)):
            if length_of is not None:
                self.lengths.append(length_of(batch))
            elif index == 0:
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
                f"{self._trial_name}.evaluate_batch() must return a dict of metrics; it returned "
                f"{metrics!r} for validation batch {index}."
            )
        if self._names is None:
            self._names = set(metrics)
        elif metrics.keys() != self._names:
            raise ValueError(
                "evaluate_batch() must return the same metrics for every batch; for validation batch "
                f"{index} it returned {sorted(metrics)}, for those before {sorted(self._names)}."
            )

    def evaluate_full_dataset(self, data_loader: Any) -> None:
        """Evaluate all of the data on the chief."""
        self.full_metrics = {}
        if self._context.distributed.rank == 0:
            metrics = self._trial.evaluate_full_dataset(data_loader=data_loader)
            if not isinstance(metrics, dict):
                raise TypeError(
                    f"{self._trial_name}.evaluate_full_dataset() must return a dict of metrics; it "
                    f"returned {metrics!r}."
                )
            self.full_metrics = to_numpy(metrics)

    def close(self) -> list[dict[str, Any]]:
        """Return the metrics of each batch of this rank; raise a RuntimeError if it is the only rank and has none."""
        batches = self.window.close()
        if not batches and self._context.distributed.size == 1:
            raise RuntimeError("The validation loader is empty. See build_validation_data_loader().")
        return batches


def takes_batch_idx(evaluate_batch: Callable[..., Any]) -> bool:
    """Return whether ``evaluate_batch`` takes ``batch_idx``: a parameter of that name, or a second positional one.

    An optional keyword-only ``batch_idx`` does not count. For a decorated function the decorator's parameters count,
    unless they include ``**kwargs``.
    """
    parameters = inspect.signature(evaluate_batch, follow_wrapped=False).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters = inspect.signature(evaluate_batch).parameters
    positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return "batch_idx" in (*positional, *by_name) or len(positional) > 1
