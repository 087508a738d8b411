"""``context.experimental``: methods of the context that Determined calls experimental."""

from __future__ import annotations

from typing import Any

from det_lightning.escaping import get_logger
from det_lightning.precision import ChosenPrecision
from det_lightning.pytorch._reducer import ReducerRegistry

logger = get_logger(__name__)


class PyTorchExperimentalContext:
    """The object ``context.experimental``.

    Example:
        >>> import det_lightning as det
        >>> with det.pytorch.init() as context:
        ...     context.experimental.disable_auto_to_device()
        >>> context.experimental.auto_to_device
        False
    """

    def __init__(self, precision: ChosenPrecision, reducers: ReducerRegistry) -> None:
        self._precision = precision
        self._reducers = reducers
        self.auto_to_device = True
        self.reproducibility_checks = True

    def use_amp(self) -> None:
        """Run forward passes under autocast and let the context scale losses and steps.

        Raise an InvalidExperimentException if called after ``wrap_model`` or another choice of precision. Without a
        CUDA device the scaler is disabled.
        """
        self._precision.use_amp()

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """Do the same as :meth:`PyTorchTrialContext.wrap_reducer`, for trials of older releases."""
        return self._reducers.wrap_reducer(reducer, name, for_training, for_validation)

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow loaders other than ``det_lightning.pytorch.DataLoader``, without sharding, repeating and skipping."""
        self.reproducibility_checks = False
        logger.info("Dataset reproducibility checks are disabled.")

    def disable_auto_to_device(self) -> None:
        """Leave batches on the loader's device; move batches in the trial with ``context.to_device``."""
        self.auto_to_device = False
        logger.info("Batches are not moved to the device automatically.")
