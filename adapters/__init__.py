"""The code that uses Lightning: ``TrialModule``, the driver of a run, strategies, Lightning's checkpoints."""

if not __name__.startswith("det_lightning."):
    raise ImportError(
        f"Import this package as det_lightning.adapters, not as {__name__}: there must be one copy of it."
    )

from det_lightning.adapters.lightning_checkpoint import DeterminedCheckpointIO
from det_lightning.adapters.module import TrialModule

__all__ = ["DeterminedCheckpointIO", "TrialModule"]
