"""Checks of a ported trial: a pytest plugin, functions for your own tests, and a recorder for the old environment."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_lightning.testing.assertions import TrainedTrial, assert_resumes, assert_same_training, run_trial
    from det_lightning.testing.in_memory import InMemoryStorage

__all__ = ["InMemoryStorage", "TrainedTrial", "assert_resumes", "assert_same_training", "run_trial"]

_MODULES = dict.fromkeys(__all__, "det_lightning.testing.assertions")
_MODULES["InMemoryStorage"] = "det_lightning.testing.in_memory"


def __getattr__(name: str) -> Any:
    # Every run of pytest imports this package with its plugin, which must not import torch.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
