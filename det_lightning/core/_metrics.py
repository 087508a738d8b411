"""Metrics that are single numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

# The kinds of dtype below np.number: int, unsigned int, float, complex, and timedelta, which counts as an integer.
_NUMBER_KINDS = "iufcm"


def scalars_of(metrics: dict[str, Any], leave_out: Iterable[str] = ()) -> dict[str, float]:
    """Return the metrics that are single numbers, which loggers can show, as floats."""
    return {
        name: float(value) for name, value in metrics.items() if name not in leave_out and is_numerical_scalar(value)
    }


def is_numerical_scalar(value: Any) -> bool:
    """Return whether ``value`` is a number, or a numpy array of shape ``()`` that holds one."""
    if type(value) is np.ndarray or isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in _NUMBER_KINDS
    return type(value) is float or isinstance(value, int | float | np.number)
