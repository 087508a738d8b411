"""The metrics of a validation on one rank as rows of numbers, if all of them are plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from det_lightning.distributed.group_collectives import Rows
from det_lightning.engine.plain_window import signature_of
from det_lightning.pytorch._reducer import Reducer, simple_reduce

_PLAIN = (np.float32, np.float64, np.int32, np.int64)


class PlainValidation:
    """The validation metrics of one rank, each reduced over its batches to one number.

    Args:
        metrics: numpy numbers, each of a type in ``_PLAIN``.
        reducers: how each metric is reduced.
        batches: the number of batches, at least 1.
    """

    #: Numbers in each row: the metric, and the number of batches as its weight in an average.
    width = 2

    def __init__(self, metrics: dict[str, Any], reducers: dict[str, Reducer], batches: int) -> None:
        self._names = list(metrics)
        self._reducers = [reducers[name] for name in self._names]
        self._types = [np.dtype(type(value)) for value in metrics.values()]
        bits = np.array([[_to_bits(value), batches] for value in metrics.values()], np.int64)
        self.rows = Rows(bits, signature_of(self._names, self._reducers, self._types), self._reduce)

    @classmethod
    def of(cls, metrics: dict[str, Any], reducers: dict[str, Reducer], batches: int) -> PlainValidation | None:
        """Return the validation with these metrics; None if there are none, or not all are plain."""
        plain = all(isinstance(name, str) and type(value) in _PLAIN for name, value in metrics.items())
        return cls(metrics, reducers, batches) if metrics and plain else None

    def with_results(self, bits: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Return the metrics over all ranks, given their bits, in the types that reducing gives them."""
        kinds = zip(self._names, self._reducers, self._types, bits, strict=True)
        return {name: _from_bits(of_rank, _type_of_result(reducer, dtype)) for name, reducer, dtype, of_rank in kinds}

    def _reduce(self, first: int, bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        results = np.zeros(bits.shape[1], np.int64)
        for row, of_ranks in enumerate(bits.transpose(1, 0, 2)):
            dtype = self._types[first + row]
            values = np.array([_from_bits(number, dtype) for number in of_ranks[:, 0]])
            results[row] = _to_bits(simple_reduce(self._reducers[first + row], values, of_ranks[:, 1].tolist()))
        return results


def _type_of_result(reducer: Reducer, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(type(simple_reduce(reducer, np.ones(1, dtype), [1])))


def _to_bits(number: Any) -> int:
    """Return an integer as it is, and a floating-point number as the bits of a float64."""
    return int(number if isinstance(number, np.integer) else np.float64(number).view(np.int64))


def _from_bits(bits: np.int64, dtype: np.dtype[Any]) -> Any:
    return dtype.type(bits if dtype.kind == "i" else bits.view(np.float64))
