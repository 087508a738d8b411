"""The precision that a trial trains in: float32, torch.amp, apex's levels, and half precision for whole models."""

from det_lightning.precision.casting import WholeModelPrecision
from det_lightning.precision.choice import ChosenPrecision

__all__ = ["ChosenPrecision", "WholeModelPrecision"]
