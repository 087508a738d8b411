"""A module that has been trained, in one call; and a trial that makes predictions."""

from __future__ import annotations

from typing import Any

import torch

from det_lightning.adapters import TrialModule
from tests.lightning import fit
from tests.trials import SmallTrial, weights_of


class Predicting(SmallTrial):
    def predict_batch(self, batch: Any) -> torch.Tensor:
        prediction: torch.Tensor = self.head(self.body(batch[0]))
        return prediction


def trained(trial: Any = SmallTrial, ckpt_path: Any = None, **flags: Any) -> Any:
    """Train a trial, or the module of one, from the same random state each time; return the module."""
    module = trial if isinstance(trial, TrialModule) else TrialModule(trial)
    fit(module, ckpt_path, **flags)
    return module


def resumes_exactly(checkpoint: Any, epochs: int = 2, trial: Any = SmallTrial) -> bool:
    """Tell whether a run that goes on from a checkpoint ends with the weights of one that never stopped."""
    resumed, straight = trained(trial, checkpoint, max_epochs=epochs), trained(trial, max_epochs=epochs)
    return torch.equal(weights_of(resumed.trial), weights_of(straight.trial))
