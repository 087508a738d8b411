"""Scalar metrics: selecting and converting single numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

# The kinds of dtype below np.number: int, unsigned int, float, complex, and timedelta, which counts as an integer.
_NUMBER_KINDS = "iufcm"
_REAL_KINDS = "iuf"


def select_scalars(metrics: dict[str, Any], leave_out: Iterable[str] = ()) -> dict[str, float]:
    """Return all real scalar metrics, for loggers, as floats; names become strings."""
    numbers = ((name, as_float(value)) for name, value in metrics.items() if name not in leave_out)
    return {str(name): number for name, number in numbers if number is not None}


def as_float(value: Any) -> float | None:
    """Return a number, or an array of shape ``()`` with a number, as a float; None for any other value.

    Complex numbers, durations and integers too large for a float give None.
    """
    if type(value) is np.ndarray and value.ndim == 0 and value.dtype.kind in _REAL_KINDS:
        return float(value)  # the case of nearly all metrics
    if not is_numerical_scalar(value) or np.iscomplexobj(value):
        return None
    try:
        return float(value)
    except (TypeError, OverflowError):
        return None


def is_numerical_scalar(value: Any) -> bool:
    """Return whether ``value`` is a number, or a numpy array of shape ``()`` with a number."""
    if type(value) is np.ndarray or isinstance(value, np.ndarray):
        return value.ndim == 0 and value.dtype.kind in _NUMBER_KINDS
    return type(value) is float or isinstance(value, int | float | np.number)
