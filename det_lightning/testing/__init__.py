"""Checks that a ported trial trains as it did: a pytest plugin, functions for your own tests, and a recorder."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_lightning.checkpoint.storage.in_memory import InMemoryStorage
    from det_lightning.testing.assertions import TrainedTrial, assert_resumes, assert_same_training, run_trial

__all__ = ["InMemoryStorage", "TrainedTrial", "assert_resumes", "assert_same_training", "run_trial"]


def __getattr__(name: str) -> Any:
    # Every run of pytest imports this package with its plugin, which must not import torch.
    if name in __all__:
        is_storage = name == "InMemoryStorage"
        module = "det_lightning.checkpoint.storage.in_memory" if is_storage else "det_lightning.testing.assertions"
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
