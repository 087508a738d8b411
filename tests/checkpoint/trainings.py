"""Trainings of the small trial that write checkpoints."""

from __future__ import annotations

from typing import Any

from det_lightning import pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from tests.trials import SmallTrial, fit_trial, seed_everything


def train(
    storage: Any,
    length: int,
    latest: str | None = None,
    callback: pytorch.PyTorchCallback | None = None,
    trial: type[SmallTrial] = SmallTrial,
    seed: int = 3,
    **writing: Any,
) -> SmallTrial:
    """Train with a checkpoint after each second batch, and none because of a validation; return the trial."""

    class Trial(trial):  # type: ignore[misc, valid-type]
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {**super().build_callbacks(), **({} if callback is None else {"callback": callback})}

    seed_everything(seed)
    trained: SmallTrial = fit_trial(
        Trial,
        hparams={},
        max_length=pytorch.Batch(length),
        validation_period=pytorch.Batch(2) if "metric" in writing else None,
        checkpoints=DeterminedCheckpoint(storage, **{"policy": "none", "period": pytorch.Batch(2), **writing}),
        latest_checkpoint=latest,
    )
    return trained
