"""``context.experimental``: methods of the context that Determined calls experimental."""

from __future__ import annotations

from det_lightning.escaping import get_logger
from det_lightning.precision import ChosenPrecision
from det_lightning.pytorch._forwarding import forward
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

    use_amp = forward("_precision", ChosenPrecision.use_amp)
    wrap_reducer = forward("_reducers", ReducerRegistry.wrap_reducer)  # for trials of older releases

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow loaders other than ``det_lightning.pytorch.DataLoader``, without sharding, repeating and skipping."""
        self.reproducibility_checks = False
        logger.info("Dataset reproducibility checks are disabled.")

    def disable_auto_to_device(self) -> None:
        """Leave batches on the loader's device; move batches in the trial with ``context.to_device``."""
        self.auto_to_device = False
        logger.info("Batches are not moved to the device automatically.")
