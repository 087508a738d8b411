"""The units of training and related names, at the path that they have in Determined."""

import enum

from det_lightning.errors import ShouldExit as _ShouldExit
from det_lightning.units import Batch, Epoch, TrainUnit

__all__ = ["Batch", "Epoch", "TrainUnit", "_ShouldExit", "_TrainBoundaryType"]


class _TrainBoundaryType(enum.Enum):
    """What is due after a batch. The engine has its own schedule; these are for scripts that compare with them."""

    CHECKPOINT = "CHECKPOINT"
    REPORT = "REPORT"
    VALIDATE = "VALIDATE"
    TRAIN = "TRAIN"
