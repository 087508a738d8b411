"""det_lightning runs Determined AI trials on PyTorch Lightning."""

import importlib
import random
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from det_lightning._experiment_config import ExperimentConfig
from det_lightning.core._cluster import ClusterInfo, RendezvousInfo, ResourcesInfo, TrialInfo, get_cluster_info
from det_lightning.errors import InvalidHP
from det_lightning.importing import import_from_path
from det_lightning.missing_parts import attribute_error, explain_imports
from det_lightning.ranks.topology import _DistributedBackend as _DistributedBackend

if TYPE_CHECKING:
    from det_lightning import (
        adapters,
        callbacks,
        checkpoint,
        compat,
        core,
        errors,
        estimator,
        experimental,
        pytorch,
        tensorboard,
        util,
    )
    from det_lightning.pytorch import PyTorchTrialContext as TrialContext

try:
    __version__ = version("det-lightning")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

#: The format of log records that Determined's scripts use.
LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"

__all__ = [
    "LOG_FORMAT",
    "ClusterInfo",
    "ExperimentConfig",
    "InvalidHP",
    "RendezvousInfo",
    "ResourcesInfo",
    "TrialContext",
    "TrialInfo",
    "__version__",
    "adapters",
    "callbacks",
    "checkpoint",
    "compat",
    "core",
    "errors",
    "estimator",
    "experimental",
    "get_cluster_info",
    "import_from_path",
    "pytorch",
    "tensorboard",
    "util",
]


def __getattr__(name: str) -> Any:
    if name == "TrialContext":  # there are no others
        return __getattr__("pytorch").PyTorchTrialContext
    # ``det.pytorch`` works after a mere ``import det_lightning as det``, at no cost if it is not used.
    if name in __all__:
        # The import of some modules draws random numbers, and the script may have set seeds already.
        state = random.getstate()
        try:
            return importlib.import_module(f"{__name__}.{name}")
        finally:
            random.setstate(state)
    raise attribute_error(__name__, name)


explain_imports()
