"""TensorBoard writers, at Determined's paths."""

from __future__ import annotations

from typing import Any

from det_lightning.missing_parts import attribute_error


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
