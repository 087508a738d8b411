"""The Core API: checkpoints, metrics, preemption and search for scripts without a trial class."""

import importlib
from typing import TYPE_CHECKING, Any

from det_lightning.core._cluster import ClusterInfo, TrialInfo, get_cluster_info
from det_lightning.missing_parts import attribute_error
from det_lightning.ranks.distributed_context import DistributedContext, DummyDistributedContext

if TYPE_CHECKING:
    from det_lightning.core._checkpoint import CheckpointContext, DownloadMode
    from det_lightning.core._context import Context, ExperimentalCoreContext, init
    from det_lightning.core._preempt import PreemptContext, PreemptMode
    from det_lightning.core._profiler import ProfilerContext
    from det_lightning.core._searcher import SearcherContext, SearcherMode, SearcherOperation, Unit
    from det_lightning.core._train import EarlyExitReason, TensorboardMode, TrainContext

__all__ = [
    "CheckpointContext",
    "ClusterInfo",
    "Context",
    "DistributedContext",
    "DownloadMode",
    "DummyDistributedContext",
    "EarlyExitReason",
    "ExperimentalCoreContext",
    "PreemptContext",
    "PreemptMode",
    "ProfilerContext",
    "SearcherContext",
    "SearcherMode",
    "SearcherOperation",
    "TensorboardMode",
    "TrainContext",
    "TrialInfo",
    "Unit",
    "get_cluster_info",
    "init",
]

# Imported on first use: a script does not pay for unused dependencies.
_MODULES = {
    **dict.fromkeys(("CheckpointContext", "DownloadMode"), "_checkpoint"),
    **dict.fromkeys(("Context", "ExperimentalCoreContext", "init"), "_context"),
    **dict.fromkeys(("PreemptContext", "PreemptMode"), "_preempt"),
    "ProfilerContext": "_profiler",
    **dict.fromkeys(("SearcherContext", "SearcherMode", "SearcherOperation", "Unit"), "_searcher"),
    **dict.fromkeys(("EarlyExitReason", "TensorboardMode", "TrainContext"), "_train"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise attribute_error(__name__, name)
