"""Metrics that are single numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def scalars_of(metrics: dict[str, Any], leave_out: Iterable[str] = ()) -> dict[str, float]:
    """Return the metrics that are single numbers, which loggers can show, as floats."""
    return {
        name: float(value) for name, value in metrics.items() if name not in leave_out and is_numerical_scalar(value)
    }


def is_numerical_scalar(value: Any) -> bool:
    """Return whether ``value`` is a number, or a numpy array of shape ``()`` that holds one."""
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and np.issubdtype(value.dtype, np.number)
    return isinstance(value, int | float | np.number)
