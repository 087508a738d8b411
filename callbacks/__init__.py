"""Lightning callbacks for trials."""

if not __name__.startswith("det_lightning."):
    raise ImportError(
        f"Import this package as det_lightning.callbacks, not as {__name__}: there must be one copy of it."
    )

from det_lightning.callbacks.checkpoint import DeterminedCheckpoint
from det_lightning.callbacks.preemption import PreemptionHandler
from det_lightning.callbacks.profiler import TorchProfiler
from det_lightning.callbacks.tensorboard import DeterminedTensorBoard

__all__ = ["DeterminedCheckpoint", "DeterminedTensorBoard", "PreemptionHandler", "TorchProfiler"]
