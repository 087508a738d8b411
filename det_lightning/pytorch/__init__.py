"""Determined's PyTorch API, at the same import paths."""

import gc
import importlib
from typing import TYPE_CHECKING, Any

from det_lightning.errors import ShouldExit
from det_lightning.missing_parts import attribute_error
from det_lightning.pytorch import samplers
from det_lightning.pytorch._callback import ClipGradsL2Norm, ClipGradsL2Value, PyTorchCallback, reset_parameters
from det_lightning.pytorch._data import DataLoader, TorchData, adapt_batch_sampler, data_length, to_device
from det_lightning.pytorch._experimental import PyTorchExperimentalContext
from det_lightning.pytorch._load import CheckpointLoadContext, load_trial_from_checkpoint_path
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial
from det_lightning.pytorch._random_state import isolated_rng
from det_lightning.pytorch._reducer import FunctionReducer as _SimpleReducer  # noqa: F401 (trials test for it)
from det_lightning.pytorch._reducer import MetricReducer, Reducer
from det_lightning.pytorch._reducer import ReducerRegistry as _PyTorchReducerContext  # noqa: F401 (tests import it)
from det_lightning.pytorch._reducer import simple_reduce as _simple_reduce_metrics  # noqa: F401
from det_lightning.pytorch._trainer_utils import _ShouldExit, _TrainBoundaryType  # noqa: F401
from det_lightning.pytorch.samplers import (
    DistributedBatchSampler,
    DistributedSampler,
    RepeatBatchSampler,
    RepeatSampler,
    ReproducibleShuffleBatchSampler,
    ReproducibleShuffleSampler,
    SkipBatchSampler,
    SkipSampler,
)
from det_lightning.units import Batch, Epoch, TrainUnit

if TYPE_CHECKING:
    from det_lightning.pytorch._trainer import Trainer, init

__all__ = [
    "Batch",
    "CheckpointLoadContext",
    "ClipGradsL2Norm",
    "ClipGradsL2Value",
    "DataLoader",
    "DistributedBatchSampler",
    "DistributedSampler",
    "Epoch",
    "LRScheduler",
    "MetricReducer",
    "PyTorchCallback",
    "PyTorchExperimentalContext",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Reducer",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "ShouldExit",
    "SkipBatchSampler",
    "SkipSampler",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "adapt_batch_sampler",
    "data_length",
    "init",
    "load_trial_from_checkpoint_path",
    "reset_parameters",
    "samplers",
    "to_device",
]


def __getattr__(name: str) -> Any:
    # The trainer imports Lightning, which is slow to import and needs modules of this package.
    if name in ("Trainer", "init"):
        collects = gc.isenabled()
        gc.disable()  # collecting would take a sixth of the time of this import
        try:
            # Some modules draw random numbers when they are imported, and the script may have set its seeds already.
            with isolated_rng():
                return getattr(importlib.import_module("det_lightning.pytorch._trainer"), name)
        finally:
            if collects:
                gc.enable()
    raise attribute_error(__name__, name)
