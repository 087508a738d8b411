"""An experiment configuration as a dict with lookups, under Determined's name.

``det_lightning.config`` checks configurations; this class takes any dict.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ExperimentConfig"]


class ExperimentConfig(dict[str, Any]):
    """An experiment configuration: a dict, with a method for each field that scripts look up.

    Methods that read a field without a default raise a ``KeyError`` if it is missing.

    Example:
        >>> import det_lightning as det
        >>> config = det.ExperimentConfig({"searcher": {"metric": "loss"}, "scheduling_unit": 50})
        >>> config.get_searcher_metric(), config.scheduling_unit()
        ('loss', 50)
    """

    def debug_enabled(self) -> bool:
        """Return ``debug``; by default False."""
        return bool(self.get("debug", False))

    def scheduling_unit(self) -> int:
        """Return the number of batches between reports; by default 100."""
        return int(self.get("scheduling_unit", 100))

    def native_parallel_enabled(self) -> bool:
        """Return ``resources.native_parallel``."""
        return bool(self["resources"]["native_parallel"])

    def average_training_metrics_enabled(self) -> bool:
        """Return ``optimizations.average_training_metrics``."""
        return bool(self["optimizations"]["average_training_metrics"])

    def slots_per_trial(self) -> int:
        """Return ``resources.slots_per_trial``."""
        return int(self["resources"]["slots_per_trial"])

    def experiment_seed(self) -> int:
        """Return ``reproducibility.experiment_seed``; by default 0."""
        return int(self.get("reproducibility", {}).get("experiment_seed", 0))

    def profiling_enabled(self) -> bool:
        """Return ``profiling.enabled``; by default False."""
        return bool(self.get("profiling", {}).get("enabled", False))

    def profiling_interval(self) -> tuple[int, int | None]:
        """Return the first batch to profile, and the batch to stop after or None; (0, 0) without profiling."""
        if not self.profiling_enabled():
            return 0, 0
        profiling = self["profiling"]
        return profiling["begin_on_batch"], profiling.get("end_after_batch")

    def profiling_sync_timings(self) -> bool:
        """Return ``profiling.sync_timings``; by default True."""
        return bool(self.get("profiling", {}).get("sync_timings", True))

    def get_records_per_epoch(self) -> int | None:
        """Return ``records_per_epoch``; None if it is missing."""
        records = self.get("records_per_epoch")
        return None if records is None else int(records)

    def get_min_validation_period(self) -> dict[str, Any]:
        """Return ``min_validation_period``; by default empty. Raise an ``AssertionError`` if it is not a dict."""
        return self._period("min_validation_period")

    def get_min_checkpoint_period(self) -> dict[str, Any]:
        """Return ``min_checkpoint_period``; by default empty. Raise an ``AssertionError`` if it is not a dict."""
        return self._period("min_checkpoint_period")

    def get_searcher_metric(self) -> str:
        """Return ``searcher.metric``; raise an ``AssertionError`` if it is not a string."""
        metric = self.get("searcher", {}).get("metric")
        if not isinstance(metric, str):
            raise AssertionError(f"searcher.metric must be the name of a metric; got {metric!r}.")
        return metric

    def get_optimizations_config(self) -> dict[str, Any]:
        """Return ``optimizations``; by default empty."""
        found: dict[str, Any] = self.get("optimizations", {})
        return found

    def get_checkpoint_storage(self) -> dict[str, Any]:
        """Return ``checkpoint_storage``; by default empty."""
        found: dict[str, Any] = self.get("checkpoint_storage", {})
        return found

    def get_entrypoint(self) -> str | list[str]:
        """Return ``entrypoint``; raise a ``ValueError`` if it is neither a string nor a list of strings."""
        found = self["entrypoint"]
        words = found if isinstance(found, list) else [found]
        if not all(isinstance(word, str) for word in words):
            raise ValueError(f"entrypoint must be a string or a list of strings; got {found!r}.")
        entrypoint: str | list[str] = found
        return entrypoint

    def _period(self, name: str) -> dict[str, Any]:
        found = self.get(name, {})
        if not isinstance(found, dict):
            raise AssertionError(f"{name} must be a dict, such as {{'batches': 100}}; got {found!r}.")
        return found
