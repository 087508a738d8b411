"""Checks of a ported trial: a pytest plugin, functions for your own tests, and a recorder for the old environment."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_lightning.testing.assertions import (
        TrainedTrial,
        assert_resumes,
        assert_same_training,
        run_trial,
    )

__all__ = ["TrainedTrial", "assert_resumes", "assert_same_training", "run_trial"]


def __getattr__(name: str) -> Any:
    # Every run of pytest imports this package with its plugin, which must not import torch.
    if name in __all__:
        return getattr(importlib.import_module("det_lightning.testing.assertions"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
