"""``core_context.profiler``, which samples nothing: the metrics of a machine are for Determined's master."""

from __future__ import annotations

from det_lightning.escaping import get_logger

logger = get_logger(__name__)


class ProfilerContext:
    """Does nothing: Determined's profiler sends samples of the machine's metrics to its master.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     core_context.profiler.on()
        ...     core_context.profiler.off()
    """

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Do nothing, as in a local run of Determined, but say so."""
        logger.info("core_context.profiler.on() has no effect without a Determined master.")

    def off(self) -> None:
        """Do nothing."""
