"""Who writes the TensorBoard files of a script."""

from __future__ import annotations

import enum


class TensorboardMode(enum.Enum):
    """Who writes TensorBoard files: the library those of reported metrics (``AUTO``), or the script (``MANUAL``)."""

    AUTO = "AUTO"
    MANUAL = "MANUAL"
