"""The precision that a trial trains in: float32, torch.amp, apex's levels, and half precision for whole models."""

from det_lightning.precision.choice import ChosenPrecision
from det_lightning.precision.whole_models import WholeModelPrecision

__all__ = ["ChosenPrecision", "WholeModelPrecision"]
