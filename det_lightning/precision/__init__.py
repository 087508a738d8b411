"""Mixed precision: apex's levels on torch.amp, torch's own scaler, and half precision for whole models."""

from det_lightning.precision.apex_levels import ApexLevels
from det_lightning.precision.installed_apex import InstalledApex, apex_is_wanted
from det_lightning.precision.interface import Precision
from det_lightning.precision.levels import Level, resolve_level
from det_lightning.precision.loss_scaler import LossScaler
from det_lightning.precision.plain import PlainPrecision
from det_lightning.precision.torch_amp import TorchAmp, make_scaler
from det_lightning.precision.whole_models import WholeModelPrecision

__all__ = [
    "ApexLevels",
    "InstalledApex",
    "Level",
    "LossScaler",
    "PlainPrecision",
    "Precision",
    "TorchAmp",
    "WholeModelPrecision",
    "apex_is_wanted",
    "make_scaler",
    "resolve_level",
]
