"""The parts of the context that Determined called experimental."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class PyTorchExperimentalContext:
    """The object ``context.experimental``."""

    def __init__(self, use_amp: Callable[[], None], wrap_reducer: Callable[..., Any]) -> None:
        self._use_amp = use_amp
        self._wrap_reducer = wrap_reducer
        self.auto_to_device = True
        self.reproducibility_checks = True

    def use_amp(self) -> None:
        """Run forward passes under autocast and let the context scale losses and steps.

        Call it before any ``wrap_model``; otherwise, or after another choice, an InvalidExperimentException is raised.
        Where there is no CUDA device the scaler is disabled.
        """
        self._use_amp()

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow loaders other than ``det_lightning.pytorch.DataLoader``, which shard, repeat and skip by themselves."""
        self.reproducibility_checks = False
        logger.info("Dataset reproducibility checks are disabled.")

    def disable_auto_to_device(self) -> None:
        """Leave batches where the loader put them; move them yourself with ``context.to_device``."""
        self.auto_to_device = False
        logger.info("Batches are not moved to the device automatically.")

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """Do the same as ``context.wrap_reducer``, under its older name."""
        return self._wrap_reducer(reducer, name, for_training, for_validation)
