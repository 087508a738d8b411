"""Optimizers that all-reduce gradients and aggregate them over several batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from det_lightning.estimator._tensorflow import tf

#: The collection of the variables that hold partially aggregated gradients. Each rank has its own values.
AGGREGATION = "det_lightning_aggregation"

_Apply = Callable[[list[tuple[Any, Any]]], Any]


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """The number of ranks and batches of an update, and whether gradients are averaged over the batches."""

    size: int
    batches: int
    averages: bool

    def apply(self, gradients: list[tuple[Any, Any]], apply: _Apply, global_step: Any) -> Any:
        """Return the operation of a batch: aggregates the gradients and, when due, updates by ``apply``.

        Args:
            gradients: pairs of a gradient, maybe None, and a variable.
            apply: returns the operation that updates the variables, and increments ``global_step``.
            global_step: the variable to increment in batches without an update, or None.
        """
        present = [
            (tf.convert_to_tensor(gradient), variable) for gradient, variable in gradients if gradient is not None
        ]
        without = [(gradient, variable) for gradient, variable in gradients if gradient is None]
        values = [gradient for gradient, _ in present]
        variables = [variable for _, variable in present]
        if self.batches == 1:
            return apply([*zip(self._exchange(values), variables, strict=True), *without])
        sums = [_create_variable(variable.shape, value.dtype) for value, variable in present]
        count = _create_variable([], tf.int64)
        additions = [count.assign_add(1), *(one.assign_add(value) for one, value in zip(sums, values, strict=True))]
        with tf.control_dependencies(additions):
            is_last = tf.equal(tf.math.floormod(count.read_value(), self.batches), 0)

        def update() -> Any:
            totals = [one.read_value() for one in sums]
            if self.averages:
                totals = [total / tf.cast(self.batches, total.dtype) for total in totals]
            updated = apply([*zip(self._exchange(totals), variables, strict=True), *without])
            with tf.control_dependencies([updated]):
                return tf.group([one.assign(tf.zeros_like(one)) for one in sums])

        def wait() -> Any:
            return tf.no_op() if global_step is None else tf.group(tf.compat.v1.assign_add(global_step, 1))

        return tf.group(tf.cond(is_last, update, wait))

    def _exchange(self, values: list[Any]) -> list[Any]:
        """Return the averages of tensors over the ranks."""
        if self.size == 1 or not values:
            return values
        averaged = tf.compat.v1.py_func(self._average, values, [value.dtype for value in values])
        for value, average in zip(values, averaged, strict=True):
            average.set_shape(value.shape)
        return list(averaged)

    def _average(self, *values: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        tensors = [torch.from_numpy(np.array(value)) for value in values]
        for handle in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            handle.wait()
        return [(tensor / self.size).numpy() for tensor in tensors]


def _create_variable(shape: Any, dtype: Any) -> Any:
    # Trials may update under control dependencies, for batch normalization; the initial zeros must have none.
    with tf.control_dependencies(None):
        return tf.compat.v1.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES, AGGREGATION],
            use_resource=True,
            name="det_lightning_aggregation",
        )


def wrap_optimizer(optimizer: Any, size: int, batches: int, averages: bool) -> Any:
    """Return an optimizer that updates by the gradients of ``size`` ranks and ``batches`` batches.

    For one rank and one batch, return ``optimizer``. Otherwise, raise a ``TypeError`` for an unknown kind.
    """
    if size == 1 and batches == 1:
        return optimizer
    aggregation = Aggregation(size, batches, averages)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _AggregatingOptimizer(optimizer, aggregation)
    if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        return _wrap_keras_optimizer(optimizer, aggregation)
    raise TypeError(
        "wrap_optimizer() takes an optimizer object, a tf.compat.v1.train.Optimizer or a "
        f"tf.keras.optimizers.legacy.Optimizer, not its name; got {optimizer!r:.200}."
    )


class _AggregatingOptimizer(tf.compat.v1.train.Optimizer):
    """Wraps another ``tf.compat.v1.train.Optimizer``."""

    def __init__(self, optimizer: Any, aggregation: Aggregation) -> None:
        super().__init__(use_locking=False, name=f"Aggregating{optimizer.get_name()}")
        self.optimizer = optimizer
        self.aggregation = aggregation

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        def apply(gradients: list[tuple[Any, Any]]) -> Any:
            return self.optimizer.apply_gradients(gradients, global_step=global_step, name=name)

        return self.aggregation.apply(list(grads_and_vars), apply, global_step)

    def get_slot(self, var: Any, name: str) -> Any:
        return self.optimizer.get_slot(var, name)

    def get_slot_names(self) -> Any:
        return self.optimizer.get_slot_names()

    def variables(self) -> Any:
        return self.optimizer.variables()


def _wrap_keras_optimizer(optimizer: Any, aggregation: Aggregation) -> Any:
    """Return an equally configured instance of a subclass, because premade Estimators require a Keras optimizer."""
    kind = type(optimizer)

    class Aggregating(kind):  # type: ignore[misc,valid-type]
        def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **kwargs: Any) -> Any:
            def apply(gradients: list[tuple[Any, Any]]) -> Any:
                return super(Aggregating, self).apply_gradients(gradients, name=name, **kwargs)

            return aggregation.apply(list(grads_and_vars), apply, self.iterations)

    Aggregating.__name__ = kind.__name__
    return Aggregating.from_config(optimizer.get_config())
