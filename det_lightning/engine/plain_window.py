"""The metrics of a window as rows of numbers, if all of them are plain numbers."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from det_lightning.distributed.group_collectives import Rows

_INT64 = range(-(2**63), 2**63)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The type of a metric: the dtype of its numbers, and whether each is an array of shape ``()``."""

    dtype: str
    in_array: bool

    def to_bits(self, values: list[Any]) -> np.ndarray[Any, Any]:
        """Return integers as they are, and floating-point numbers as the bits of float64."""
        return np.array(values, np.int64 if "int" in self.dtype else np.float64).view(np.int64)

    def mean(self, bits: np.ndarray[Any, Any]) -> Any:
        """Return the mean of numbers, given their bits, rounded as numpy does for this type."""
        if "int" in self.dtype:
            return np.mean(bits)
        values = bits.view(np.float64)
        return np.mean(values.astype(np.float32) if self.dtype == "float32" else values)

    def as_mean(self, mean: np.float64) -> Any:
        """Return the mean in the type that numpy gives the mean of such metrics."""
        rounded = np.float32(mean) if self.dtype == "float32" else mean
        return np.array(rounded) if self.in_array else rounded


_KIND_BY_TYPE = {
    float: _Kind("float64", False),
    np.float64: _Kind("float64", False),
    np.float32: _Kind("float32", False),
    int: _Kind("int64", False),
    np.int64: _Kind("int64", False),
}
_KIND_BY_DTYPE = {np.dtype(name): _Kind(name, True) for name in ("float64", "float32", "int64", "int32")}


def _kind_of(value: Any) -> _Kind | None:
    """Return the kind of a value; None if it is not one plain number."""
    if type(value) is np.ndarray:
        return _KIND_BY_DTYPE.get(value.dtype) if value.shape == () else None
    return None if type(value) is int and value not in _INT64 else _KIND_BY_TYPE.get(type(value))


class PlainWindow:
    """The metrics of each batch of a window, with the same names and types in each; ``kinds`` are the types."""

    #: Numbers in each row.
    width = 1

    def __init__(self, kinds: dict[str, _Kind], batches: list[dict[str, Any]]) -> None:
        self._names = list(kinds)
        self._kinds = list(kinds.values())
        bits = np.stack([kind.to_bits([batch[name] for batch in batches]) for name, kind in kinds.items()], axis=1)
        #: One row for each metric of each batch, which is reduced to its mean.
        self.rows = Rows(bits.reshape(-1, 1), signature_of(self._names, self._kinds, len(batches)), self._means)

    @classmethod
    def of(cls, batches: list[dict[str, Any]]) -> PlainWindow | None:
        """Return the window of these batches; None if there are no values, or not all are plain."""
        if not batches or not batches[0]:
            return None
        names = list(batches[0])
        kinds = {name: kind for name, value in batches[0].items() if (kind := _kind_of(value)) is not None}
        if len(kinds) < len(names) or not all(isinstance(name, str) for name in names):
            return None
        expected = list(kinds.values())
        for batch in batches:
            if list(batch) != names or [_kind_of(value) for value in batch.values()] != expected:
                return None
        return cls(kinds, batches)

    def with_means(self, bits: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        """Return the means of the metrics of each batch, given their bits, in the types of such means."""
        return [
            {name: kind.as_mean(mean) for name, kind, mean in zip(self._names, self._kinds, means, strict=True)}
            for means in bits.view(np.float64).reshape(-1, len(self._names))
        ]

    def _means(self, first: int, bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # One by one: numpy adds the rows of a matrix in a different order than the numbers of a vector.
        columns = np.ascontiguousarray(bits[:, :, 0].T)
        means = [self._kinds[index % len(self._kinds)].mean(column) for index, column in enumerate(columns, first)]
        return np.array(means, np.float64).view(np.int64)


def signature_of(*meaning: object) -> int:
    """Return a number that identifies what rows mean, from objects whose ``repr`` is the same on all ranks."""
    digest = hashlib.sha256(repr(meaning).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7], "big") + 1  # not 0
