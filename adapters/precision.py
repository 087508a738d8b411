"""Lightning's ``precision=``, applied to each wrapped model of a trial."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import Precision

from det_lightning.precision import WholeModelPrecision

_TYPES = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
#: The values of ``pl.Trainer(precision=...)`` that a trial can be trained with.
TRIAL_PRECISIONS = ("32-true", *_TYPES)


class TrialPrecision(Precision):
    """Replaces Lightning's plugin, whose autocast would cover whole steps, including backward passes and updates.

    Args:
        precision: the value of ``trainer.precision``.
    """

    def __init__(self, precision: Any) -> None:
        self.precision = precision


def take_precision(trainer: pl.Trainer) -> WholeModelPrecision | None:
    """Replace Lightning's precision plugin; return the precision for each wrapped model, None for float32."""
    plugin = trainer.strategy.precision_plugin
    dtype = _TYPES.get(plugin.precision)
    if dtype is None:
        return None
    scales = plugin.precision == "16-mixed"
    if not isinstance(plugin, TrialPrecision):
        trainer.strategy.precision_plugin = TrialPrecision(plugin.precision)
    return WholeModelPrecision(
        f"pl.Trainer(precision={plugin.precision!r})",
        dtype,
        casts_weights=plugin.precision.endswith("-true"),
        scales=scales,
        scaler=getattr(plugin, "scaler", None) if scales else None,
    )
