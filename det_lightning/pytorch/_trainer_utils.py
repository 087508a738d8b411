"""The units of training and related names, at Determined's path."""

import enum

from det_lightning.errors import ShouldExit as _ShouldExit
from det_lightning.units import Batch, Epoch, TrainUnit

__all__ = ["Batch", "Epoch", "TrainUnit", "_ShouldExit", "_TrainBoundaryType"]


class _TrainBoundaryType(enum.Enum):
    """The kinds of boundaries after a batch, for scripts that import the name; the engine does not use it."""

    CHECKPOINT = "CHECKPOINT"
    REPORT = "REPORT"
    VALIDATE = "VALIDATE"
    TRAIN = "TRAIN"
