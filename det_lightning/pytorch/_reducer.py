"""Reducers, which combine the metrics of many batches, on many ranks, into one value; and the registry of a trial.

Change here: a reducer of ``evaluation_reducer()`` is a member of ``Reducer`` and a case of ``simple_reduce``; other
objects are accepted by ``ReducerRegistry.wrap_reducer``.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from det_lightning import errors
from det_lightning.arguments import describe, require

if TYPE_CHECKING:
    import torchmetrics

AllGather = Callable[[Any], list[Any]]


class Reducer(enum.Enum):
    """How the values of a validation metric are combined: over batches, then over ranks.

    Example:
        >>> from det_lightning.pytorch import PyTorchTrial, Reducer
        >>> class CountingTrial(PyTorchTrial):
        ...     def evaluation_reducer(self):
        ...         return {"validation_loss": Reducer.AVG, "mistakes": Reducer.SUM}
    """

    AVG = 1
    SUM = 2
    MAX = 3
    MIN = 4


def simple_reduce(reducer: Reducer, metrics: Any, num_batches: list[int] | None = None) -> Any:
    """Reduce an array or sequence of shape ``(n, ...)``, with one entry per batch or rank, to one value.

    AVG weights the entries by ``num_batches``, the number of batches of each rank, of shape ``(n,)``.
    """
    if reducer is Reducer.AVG:
        return np.average(metrics, weights=num_batches)
    reduce: dict[Reducer, Callable[[Any], Any]] = {Reducer.SUM: np.sum, Reducer.MAX: np.max, Reducer.MIN: np.min}
    return reduce[reducer](metrics)


class MetricReducer(abc.ABC):
    """A metric other than a mean over batches: each rank collects values, and all ranks reduce the values together.

    Register an object of a subclass with ``context.wrap_reducer``. Give the subclass a method that collects values,
    and call the method in ``train_batch`` or ``evaluate_batch``.

    Example:
        >>> from det_lightning.pytorch import MetricReducer
        >>> class Share(MetricReducer):
        ...     def reset(self):
        ...         self.right, self.all = 0, 0
        ...     def update(self, right, of):
        ...         self.right, self.all = self.right + right, self.all + of
        ...     def per_slot_reduce(self):
        ...         return self.right, self.all
        ...     def cross_slot_reduce(self, per_slot_metrics):
        ...         return sum(right for right, _ in per_slot_metrics) / sum(of for _, of in per_slot_metrics)
        >>> Share().cross_slot_reduce([(3, 4), (1, 4)])  # of two ranks
        0.5
    """

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget all collected values. Called before every training and every validation workload."""

    @abc.abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return the contribution of this rank, as any picklable value."""

    @abc.abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric, given the contributions of all ranks in rank order.

        A reducer wrapped without a name returns a dict of metrics; with a name, anything but a dict.
        """


class FunctionReducer(MetricReducer):
    """Collects values and passes all values to one function; returned by ``wrap_reducer(fn)``."""

    def __init__(self, fn: Callable[[list[Any]], Any]) -> None:
        self.fn = fn
        self.values: list[Any] = []

    def reset(self) -> None:
        self.values = []

    def update(self, value: Any) -> None:
        """Add a value: one element of the function's list."""
        self.values.append(value)

    def per_slot_reduce(self) -> Any:
        return self.values

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        # Rank r had every n-th batch, so taking one value of each rank in turn restores the unsharded order.
        missing = object()
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*per_slot_metrics, fillvalue=missing))
        return self.fn([value for value in in_turn if value is not missing])


def _is_torchmetrics(reducer: Any) -> bool:
    if not isinstance(reducer, torch.nn.Module):
        return False
    # With scipy and matplotlib, if installed, this would take half the time of importing det_lightning.pytorch.
    from torchmetrics import Metric, MetricCollection

    return isinstance(reducer, (Metric, MetricCollection))


class TorchMetricReducer(MetricReducer):
    """A metric or collection of torchmetrics; ``compute`` synchronizes all ranks through ``allgather``, if any."""

    def __init__(
        self, metric: torchmetrics.Metric | torchmetrics.MetricCollection, allgather: AllGather | None
    ) -> None:
        self.metric = metric
        if allgather is None:
            return

        def gather(values: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
            return [found.to(values.device) for found in allgather(values.detach().cpu())]

        module: Any
        for module in metric.modules():
            if hasattr(module, "dist_sync_fn"):  # a collection has none
                module.dist_sync_fn = gather
                module.distributed_available_fn = lambda: True

    def reset(self) -> None:
        self.metric.reset()

    def per_slot_reduce(self) -> Any:
        value = self.metric.compute()
        return {name: v.cpu() for name, v in value.items()} if isinstance(value, dict) else value.cpu()

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        return per_slot_metrics[0]


@dataclasses.dataclass
class _Registration:
    """A reducer, the object that the trial updates, and the name and the workloads of the metric."""

    wrapped: object
    reducer: MetricReducer
    name: str | None
    training: bool
    validation: bool

    def describe(self) -> str:
        if isinstance(self.reducer, FunctionReducer):
            return f"reducer function {getattr(self.reducer.fn, '__name__', repr(self.reducer.fn))}()"
        return f"reducer {type(self.wrapped).__name__}"

    def run(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.reducer, method)(*args)
        except errors.InvalidHP:
            raise
        except Exception as e:
            given = f" with per_slot_metrics={args[0]}" if args else ""
            raise ValueError(f"{self.describe()} (name={self.name!r}) failed in {method}(){given}: {e}") from e

    def as_metrics(self, reduced: Any) -> dict[str, Any]:
        if self.name is None and not isinstance(reduced, dict):
            raise AssertionError(
                f"{self.describe()} was wrapped with name=None and must return a dict of metrics; got {reduced!r} of "
                f"type {type(reduced).__name__}. Pass name= to wrap_reducer for a single metric."
            )
        if self.name is not None and isinstance(reduced, dict):
            raise AssertionError(
                f"{self.describe()} was wrapped with name={self.name!r} and must return one metric; got a dict with "
                f"the keys {sorted(map(str, reduced))}. Leave out name= to return several metrics."
            )
        return reduced if self.name is None else {self.name: reduced}


class ReducerRegistry:
    """The reducers of one trial.

    ``allgather_fn`` returns on each of ``size`` ranks a list of the arguments of all ranks, in rank order. The states
    of torchmetrics metrics are moved to ``device``.
    """

    def __init__(
        self, allgather_fn: AllGather = lambda own: [own], size: int = 1, device: torch.device | None = None
    ) -> None:
        self._allgather = allgather_fn
        self._size = size
        self._device = device
        self._registrations: list[_Registration] = []

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        require(isinstance(name, str | None), "wrap_reducer(reducer, name)", "a name as a text", name)
        if isinstance(reducer, type) and hasattr(reducer, "reset"):
            raise AssertionError(
                f"wrap_reducer() takes an object; got {describe(reducer)} (name={name!r}). Create one first: "
                f"wrap_reducer({reducer.__name__}(...), ...)."
            )
        if isinstance(reducer, torch.nn.Module) and self._device is not None:
            reducer.to(self._device)
        if any(reducer is known.wrapped for known in self._registrations):
            raise AssertionError(
                f"wrap_reducer() got the same {type(reducer).__name__} object a second time (name={name!r}); each "
                "reducer is wrapped once. Create a second object for a second metric."
            )
        wrapped: Any = reducer
        registered: MetricReducer
        if _is_torchmetrics(reducer):
            needs_allgather = self._size > 1 and not dist.is_initialized()
            registered = TorchMetricReducer(reducer, self._allgather if needs_allgather else None)
        elif isinstance(reducer, MetricReducer):
            registered = reducer
        elif callable(reducer) and reducer is not Reducer:
            wrapped = registered = FunctionReducer(reducer)  # a new object: one function may serve several metrics
        else:
            raise AssertionError(
                "wrap_reducer() takes a function, a MetricReducer or a torchmetrics metric; got "
                f"{reducer!r} of type {type(reducer).__name__} (name={name!r})."
            )
        self._registrations.append(_Registration(wrapped, registered, name, for_training, for_validation))
        return wrapped

    def reset_reducers(self) -> None:
        for registration in self._registrations:
            registration.run("reset")

    @property
    def reduces_training(self) -> bool:
        """Whether any reducer is for training metrics."""
        return any(registration.training for registration in self._registrations)

    def reduce_metrics(self, for_training: bool, allgather_fn: AllGather | None = None) -> dict[str, Any]:
        due = [r for r in self._registrations if (r.training if for_training else r.validation)]
        return _combine(due, (allgather_fn or self._allgather)(_contributions(due))) if due else {}

    def reduce_on_chief(self, gather: Callable[[Any], list[Any] | None]) -> dict[str, Any] | None:
        """Return the metrics of all reducers on the rank where ``gather`` returns all ranks' values; None elsewhere."""
        if not self._registrations:
            return None
        per_rank = gather(_contributions(self._registrations))
        return None if per_rank is None else _combine(self._registrations, per_rank)


class ReducerMethods:
    """The methods of a context for its reducers."""

    reducers: ReducerRegistry

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """Register a metric computed over all batches and ranks together.

        Args:
            reducer: a function of the list of all values given to ``update()``; a :class:`MetricReducer`; or a
                torchmetrics ``Metric`` or ``MetricCollection``.
            name: the name of the metric; None if the reducer returns a dict of metrics.
            for_training, for_validation: reduce at the end of training workloads, and at the end of validations.

        Returns:
            The object to update: ``reducer``, or for a function an object with the method ``update(value)``.

        Raises:
            AssertionError: the object was wrapped before, or has the wrong type.
        """
        return self.reducers.wrap_reducer(reducer, name, for_training, for_validation)

    def reset_reducers(self) -> None:
        """Reset every wrapped reducer. Called by the training loop before each workload."""
        self.reducers.reset_reducers()

    def reduce_metrics(self, for_training: bool, allgather_fn: AllGather | None = None) -> dict[str, Any]:
        """Return the metrics of the wrapped reducers over all ranks, for the training loop to report.

        Args:
            for_training: whether to reduce the metrics of a training workload, or of a validation.
            allgather_fn: replaces the registry's ``allgather_fn``.

        Raises:
            ValueError: a reducer failed. The message names the reducer, the method and the arguments.
            AssertionError: a reducer with a name returned a dict, or a reducer without a name anything else.
        """
        return self.reducers.reduce_metrics(for_training, allgather_fn)


def _contributions(registrations: list[_Registration]) -> list[Any]:
    return [registration.run("per_slot_reduce") for registration in registrations]


def _combine(registrations: list[_Registration], per_rank: list[Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for registration, per_slot in zip(registrations, zip(*per_rank, strict=True), strict=True):
        metrics.update(registration.as_metrics(registration.run("cross_slot_reduce", cast("Any", per_slot))))
    return metrics


# Determined's names, for code that imports this module rather than the package.
_PyTorchReducerContext = ReducerRegistry
_SimpleReducer = FunctionReducer
_simple_reduce_metrics = simple_reduce
