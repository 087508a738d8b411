"""The options of a run, and the factory of the loaders, decided before the run begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.engine.stopping import StopRequest
from det_lightning.pytorch._data import DataLoader
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How the caller wants a run.

    Attributes:
        resumed: the checkpoint to resume from.
        stop_request: whether this process was asked to end.
        epoch_limit: the maximum number of batches in an epoch (int), or a share of the loader's batches (float).
        overfits: train every epoch on the same batches, the first in dataset order.
        keeps_training_metrics: keep the metrics of the latest training batch for hooks, as the trial returned the dict.
        keeps_validation_metrics: the same for validation batches.
        hooks_follow_report: other hooks run after a report, before anything else is due at the boundary.
        hooks_follow_validation: the same after a validation.
        has_checkpoint_news: whether the chief has a completed or failed checkpoint, unknown to other ranks.
    """

    resumed: CheckpointContent | None = None
    stop_request: StopRequest | None = None
    epoch_limit: float = 1.0
    overfits: bool = False
    keeps_training_metrics: bool = False
    keeps_validation_metrics: bool = False
    hooks_follow_report: bool = False
    hooks_follow_validation: bool = False
    has_checkpoint_news: Callable[[], bool] = lambda: False


class LoaderFactory:
    """Builds the loaders of a run by the methods of the trial."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        self.trial = trial
        self.context = context

    def build_training(self, overfit_batches: float | None = None) -> Any:
        """Return the training loader; for ``overfit_batches`` a ``DataLoader``, or raise an UnsupportedTrainerFlags."""
        loader = self.trial.build_training_data_loader()
        if overfit_batches is not None and not isinstance(loader, DataLoader):
            raise errors.UnsupportedTrainerFlags(
                f"overfit_batches={overfit_batches} needs a det_lightning.pytorch.DataLoader; "
                f"build_training_data_loader() returned a {type(loader).__module__}.{type(loader).__name__}. Return a "
                "subset of the data instead."
            )
        return self._require_allowed("build_training_data_loader", loader)

    def build_validation(self) -> Any:
        """Return the validation loader."""
        return self._require_allowed("build_validation_data_loader", self.trial.build_validation_data_loader())

    def _require_allowed(self, method: str, loader: Any) -> Any:
        if self.context.experimental.reproducibility_checks and not isinstance(loader, DataLoader):
            raise RuntimeError(
                f"{method}() returned a {type(loader).__module__}.{type(loader).__name__}, which is not repeated, "
                "sharded and resumed for you. Return a det_lightning.pytorch.DataLoader, which takes the same "
                "arguments; or, to do all of that yourself, you can disable this check by calling "
                "context.experimental.disable_dataset_reproducibility_checks() in the trial's __init__."
            )
        return loader
