"""Attaching a callback to a trial's module."""

from __future__ import annotations

import pytorch_lightning as pl

from det_lightning.adapters.module import TrialModule


def require_trial_module(callback: pl.Callback, module: pl.LightningModule) -> TrialModule:
    """Return the module; raise a TypeError unless it is a :class:`TrialModule`."""
    if not isinstance(module, TrialModule):
        raise TypeError(
            f"{type(callback).__name__} works with a det_lightning.adapters.TrialModule; got a {type(module).__name__}."
        )
    return module
