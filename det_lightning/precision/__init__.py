"""The precision of a trial: float32, torch.amp, apex's levels, and half or double precision for whole models."""

from det_lightning.precision.choice import ChosenPrecision, WholeModelPrecision

__all__ = ["ChosenPrecision", "WholeModelPrecision"]
