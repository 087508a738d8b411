"""Metrics of the machine while a script runs."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

from det_lightning.core._task import TrialTask
from det_lightning.escaping import get_logger
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)

_BYTES = {
    "net_throughput_sent": ("net_io_counters", "bytes_sent"),
    "net_throughput_recv": ("net_io_counters", "bytes_recv"),
    "disk_throughput_read": ("disk_io_counters", "read_bytes"),
    "disk_throughput_write": ("disk_io_counters", "write_bytes"),
}


class ProfilerContext:
    """Samples processor, memory, disk and network in a thread, for the metrics of a trial of an experiment.

    The first process on each machine samples. Outside of experiments :meth:`on` does nothing. The names of the groups
    and metrics are Determined's.

    Example:
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     core_context.profiler.on(sampling_interval=0.5, samples_per_report=20)
        ...     # train here: an experiment gets averages every 10 seconds
        ...     core_context.profiler.off()
    """

    def __init__(self, distributed: DistributedContext, task: TrialTask | None = None) -> None:
        self._distributed = distributed
        self._task = task
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Start sampling; a second call does nothing.

        Args:
            sampling_interval: seconds between two samples, at least 0.1.
            samples_per_report: number of samples to average for each report.

        Raises:
            ValueError: an argument is too small, in a trial of an experiment.
        """
        if self._task is None or self._thread is not None:
            return
        if sampling_interval < 0.1:
            raise ValueError(f"sampling_interval must be at least 0.1 s; got {sampling_interval}.")
        if not isinstance(samples_per_report, int) or samples_per_report < 1:
            raise ValueError(f"samples_per_report must be an integer of at least 1; got {samples_per_report!r}.")
        if self._distributed.local_rank != 0:
            return
        try:
            import psutil
        except ImportError:
            logger.warning("The profiler needs psutil, and samples nothing without it: pip install psutil.")
            return
        self._ends.clear()
        arguments = (psutil, self._task, sampling_interval, samples_per_report)
        self._thread = threading.Thread(target=self._sample, args=arguments, name="det_lightning-profiler", daemon=True)
        self._thread.start()

    def off(self) -> None:
        """Stop sampling; a second call does nothing."""
        if self._thread is not None:
            self._ends.set()
            self._thread.join()
            self._thread = None

    def _sample(self, psutil: Any, task: TrialTask, interval_s: float, samples_per_report: int) -> None:
        before = _read_counters(psutil)
        since = time.monotonic()
        samples: list[dict[str, dict[str, float]]] = []
        while not self._ends.wait(interval_s):
            counters = _read_counters(psutil)
            now = time.monotonic()
            rates = {name: (counters[name] - before[name]) / (now - since) for name in counters}
            before = counters
            since = now
            samples.append(_make_sample(psutil, rates))
            if len(samples) == samples_per_report:
                for group, first in samples[0].items():
                    averages = {name: statistics.fmean(sample[group][name] for sample in samples) for name in first}
                    task.report(group, None, averages)
                samples.clear()


def _read_counters(psutil: Any) -> dict[str, int]:
    # On a machine without disks a function returns None.
    return {name: getattr(getattr(psutil, function)(), field, 0) for name, (function, field) in _BYTES.items()}


def _make_sample(psutil: Any, rates: dict[str, float]) -> dict[str, dict[str, float]]:
    return {
        "cpu": {"cpu_util_simple": psutil.cpu_percent()},
        "memory": {"memory_free": float(psutil.virtual_memory().available)},
        "disk": {name: rate for name, rate in rates.items() if name.startswith("disk")},
        "network": {name: rate for name, rate in rates.items() if name.startswith("net")},
    }
