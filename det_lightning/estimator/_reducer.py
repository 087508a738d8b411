"""``MetricReducer`` and ``make_metric``: validation metrics computed in Python, over the batches of all ranks."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf


class MetricReducer:
    """Computes a metric in two steps: over the batches of each rank, then over the ranks."""

    @abc.abstractmethod
    def accumulate(self, metric: Any) -> Any:
        """Add the value of a batch; return the accumulated value of all batches so far.

        Args:
            metric: an array, or a list or dict of arrays, shaped like the tensors given to ``make_metric``.
        """

    @abc.abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric.

        Args:
            per_slot_metrics: the result of the last :meth:`accumulate` of each rank.
        """


class _FunctionReducer(MetricReducer):
    """Collects the values of all batches for a function of the list of values."""

    def __init__(self, reduce: Callable[[list[Any]], Any]) -> None:
        self._reduce = reduce
        self._values: list[Any] = []

    def accumulate(self, metric: Any) -> list[Any]:
        self._values.append(metric)
        return self._values

    def cross_slot_reduce(self, per_slot_metrics: list[list[Any]]) -> Any:
        return self._reduce([value for values in per_slot_metrics for value in values])


class ReducedMetrics:
    """The metrics of the current evaluation graph, with exchanges between ranks in a fixed order."""

    def __init__(self, allgather: Callable[[Any], list[Any]]) -> None:
        self._allgather = allgather
        self._exchanges: list[Any] = []

    def begin_graph(self) -> None:
        """Forget the operations of an earlier graph."""
        self._exchanges = []

    def make_metric(
        self, metric: Any, reducer: Callable[[list[Any]], Any] | MetricReducer, numpy_dtype: Any
    ) -> tuple[tf.Tensor, tf.Operation]:
        from det_lightning.estimator._tensorflow import tf

        tensors, rebuild = _flatten(metric)
        used = reducer if isinstance(reducer, MetricReducer) else _FunctionReducer(reducer)
        dtype = np.dtype(numpy_dtype)
        accumulated: list[Any] = [None]

        def update(*values: Any) -> None:
            accumulated[0] = used.accumulate(rebuild(values))

        def reduce() -> Any:
            return np.array(used.cross_slot_reduce(self._allgather(accumulated[0]))).astype(dtype)

        graph = tf.compat.v1.get_default_graph()
        with tf.control_dependencies([one for one in self._exchanges if one.graph is graph]):
            value = tf.compat.v1.py_func(reduce, [], tf.as_dtype(dtype))
        self._exchanges.append(value)
        return value, tf.compat.v1.py_func(update, tensors, [])


def _flatten(metric: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return the tensors of a metric, and a function that arranges values of the tensors like the metric."""
    from det_lightning.estimator._tensorflow import tf

    if isinstance(metric, dict):
        names = list(metric)
        return _require_tensors(list(metric.values()), metric), lambda values: dict(zip(names, values, strict=True))
    if isinstance(metric, list | tuple):
        return _require_tensors(list(metric), metric), list
    try:
        return [tf.convert_to_tensor(metric)], lambda values: values[0]
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"A metric must be a tensor, a list of tensors, or a dict of them by name; got a {type(metric).__name__}."
        ) from e


def _require_tensors(values: list[Any], metric: Any) -> list[Any]:
    from det_lightning.estimator._tensorflow import tf

    wrong = sorted({type(value).__name__ for value in values if not isinstance(value, tf.Tensor | tf.Variable)})
    if wrong:
        raise TypeError(
            f"A {type(metric).__name__} of metrics must be flat and hold tensors only; got {', '.join(wrong)}."
        )
    return values
