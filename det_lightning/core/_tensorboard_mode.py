"""Who writes the TensorBoard files of a script."""

from __future__ import annotations

import enum


class TensorboardMode(enum.Enum):
    """Who writes TensorBoard files: the library, with the reported metrics (``AUTO``), or the script (``MANUAL``).

    Example:
        >>> import det_lightning as det
        >>> mode = det.core.TensorboardMode.MANUAL
        >>> with det.core.init(checkpoint_storage="checkpoints", tensorboard_mode=mode) as core_context:
        ...     core_context.train.report_training_metrics(steps_completed=1, metrics={"loss": 0.5})
        ...     list(core_context.train.get_tensorboard_path().glob("*"))
        []
    """

    AUTO = "AUTO"
    MANUAL = "MANUAL"
