"""The units of training and related names, at Determined's path."""

import enum

from det_lightning.errors import ShouldExit as _ShouldExit
from det_lightning.units import Batch, Epoch, TrainUnit

__all__ = ["Batch", "Epoch", "TrainUnit", "_ShouldExit", "_TrainBoundaryType"]


class _TrainBoundaryType(enum.Enum):
    """The kinds of boundaries after a batch, for scripts that compare with Determined's; the engine uses none."""

    CHECKPOINT = "CHECKPOINT"
    REPORT = "REPORT"
    VALIDATE = "VALIDATE"
    TRAIN = "TRAIN"
