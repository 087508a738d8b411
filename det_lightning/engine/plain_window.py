"""The metrics of a window as one vector, if all of them are plain floating-point numbers."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


class PlainWindow:
    """The metrics of each batch of a window, with the same names and types in each.

    ``values`` is float64, of shape ``(batches * metrics,)``, ``is_single`` which of them are float32. ``signature`` is
    equal on two ranks if their vectors mean the same.
    """

    def __init__(self, names: list[str], kinds: list[str], batches: list[dict[str, Any]]) -> None:
        self._names = names
        self._kinds = kinds
        self.values = np.array([[batch[name] for name in names] for batch in batches], np.float64).reshape(-1)
        self.is_single = np.array([kind == "float32" for kind in kinds] * len(batches))
        content = repr((names, kinds, len(batches)))
        self.signature = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()

    @classmethod
    def of(cls, batches: list[dict[str, Any]]) -> PlainWindow | None:
        """Return the window of these batches; None if not all values are plain, or there are none."""
        if not batches or not batches[0]:
            return None
        names = list(batches[0])
        kinds = [_kind(batches[0][name]) for name in names]
        if not all(isinstance(name, str) for name in names) or not all(kinds):
            return None
        for batch in batches:
            if list(batch) != names or [_kind(value) for value in batch.values()] != kinds:
                return None
        return cls(names, kinds, batches)

    def with_values(self, values: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
        """Return the metrics of each batch, of the types of means of these, with other values."""
        rows = values.reshape(-1, len(self._names))
        return [
            {name: _of_kind(kind, value) for name, kind, value in zip(self._names, self._kinds, row, strict=True)}
            for row in rows
        ]


def _kind(value: Any) -> str:
    """Return ``float32`` or ``float64`` for an array of one such number, ``float`` for Python's; else empty text."""
    if type(value) is float:
        return "float"
    if type(value) is np.ndarray and value.shape == () and value.dtype in (np.float32, np.float64):
        return str(value.dtype)
    return ""


def _of_kind(kind: str, value: np.float64) -> Any:
    return value if kind == "float" else np.array(value, np.dtype(kind))
