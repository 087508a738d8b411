"""The units of training, at the path that they have in Determined."""

from det_lightning.units import Batch, Epoch, TrainUnit

__all__ = ["Batch", "Epoch", "TrainUnit"]
