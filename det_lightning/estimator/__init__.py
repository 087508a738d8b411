"""Trials of TensorFlow Estimators, at Determined's path.

Importing this package switches TensorFlow, if it is installed, to the version 1 behaviour that Estimators need.
"""

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from det_lightning.estimator._context import EstimatorContext, EstimatorExperimentalContext, EstimatorTrialContext
from det_lightning.estimator._reducer import MetricReducer
from det_lightning.estimator._trial import EstimatorTrial, ServingInputReceiverFn
from det_lightning.missing_parts import attribute_error

if TYPE_CHECKING:
    from det_lightning.estimator._files import load_estimator_from_checkpoint_path
    from det_lightning.estimator._module import EstimatorModule
    from det_lightning.estimator._session import RunHook
    from det_lightning.estimator._trainer import EstimatorNativeContext, Trainer, init

#: The names that need TensorFlow, with the module that defines each.
_WITH_TENSORFLOW = {
    "EstimatorModule": "_module",
    "EstimatorNativeContext": "_trainer",
    "RunHook": "_session",
    "Trainer": "_trainer",
    "init": "_trainer",
    "load_estimator_from_checkpoint_path": "_files",
}

__all__ = [
    "EstimatorContext",
    "EstimatorExperimentalContext",
    "EstimatorModule",
    "EstimatorNativeContext",
    "EstimatorTrial",
    "EstimatorTrialContext",
    "MetricReducer",
    "RunHook",
    "ServingInputReceiverFn",
    "Trainer",
    "init",
    "load_estimator_from_checkpoint_path",
]

# Done now, before the importing trial builds a graph. A missing TensorFlow is reported on first use.
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("det_lightning.estimator._tensorflow")


def __getattr__(name: str) -> Any:
    if name in _WITH_TENSORFLOW:
        return getattr(importlib.import_module(f"{__name__}.{_WITH_TENSORFLOW[name]}"), name)
    raise attribute_error(__name__, name)
