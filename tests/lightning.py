"""Lightning as the tests use it: from the package that det_lightning has chosen."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from det_lightning.adapters.lightning_package import lightning_version, pl
from tests.trials import seed_everything

if TYPE_CHECKING:
    from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel
else:
    _boring = importlib.import_module(f"{pl.__name__}.demos.boring_classes")
    BoringModel, BoringDataModule = _boring.BoringModel, _boring.BoringDataModule

__all__ = ["BoringDataModule", "BoringModel", "fit", "lightning_version", "pl", "trainer"]


def trainer(callbacks: Sequence[pl.Callback] = (), **flags: Any) -> pl.Trainer:
    """Return a trainer for one epoch on the CPU, silent and without checkpoints unless flags or callbacks differ."""
    kinds = {"enable_progress_bar": pl.callbacks.ProgressBar, "enable_checkpointing": pl.callbacks.Checkpoint}
    of_callbacks = {flag: any(isinstance(one, kind) for one in callbacks) for flag, kind in kinds.items()}
    quiet = {"accelerator": "cpu", "logger": False, "enable_model_summary": False, **of_callbacks}
    length = {} if "max_steps" in flags else {"max_epochs": 1}
    return pl.Trainer(**{**quiet, **length, **flags}, callbacks=list(callbacks))


def fit(module: pl.LightningModule, ckpt_path: Any = None, **flags: Any) -> pl.Trainer:
    """Train from the same random state each time, or from another one if a checkpoint has it; return the trainer."""
    seed_everything(3 if ckpt_path is None else 99)
    made = trainer(**flags)
    made.fit(module, ckpt_path=ckpt_path)
    return made
