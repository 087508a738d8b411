"""``det.ExperimentConfig``: a configuration as a dict with lookups; for checks see ``det_lightning.config``."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["ExperimentConfig"]

_T = TypeVar("_T")


class ExperimentConfig(dict[str, Any]):
    """An experiment configuration: any dict, with a method for each field that scripts look up.

    For a missing field a method returns Determined 0.38.1's default, or raises a ``KeyError`` if there is none.
    ``get_searcher_metric()`` and the two periods raise an ``AssertionError`` for a value of a wrong type,
    ``get_entrypoint()`` a ``ValueError``. ``profiling_interval()`` returns the first batch to profile, and the batch to
    stop after or None; ``(0, 0)`` without profiling.

    Example:
        >>> import det_lightning as det
        >>> config = det.ExperimentConfig({"searcher": {"metric": "loss"}, "scheduling_unit": 50})
        >>> config.get_searcher_metric(), config.scheduling_unit()
        ('loss', 50)
    """

    def debug_enabled(self) -> bool:
        return bool(self.get("debug", False))

    def scheduling_unit(self) -> int:
        return int(self.get("scheduling_unit", 100))

    def native_parallel_enabled(self) -> bool:
        return bool(self["resources"]["native_parallel"])

    def average_training_metrics_enabled(self) -> bool:
        return bool(self["optimizations"]["average_training_metrics"])

    def slots_per_trial(self) -> int:
        return int(self["resources"]["slots_per_trial"])

    def experiment_seed(self) -> int:
        return int(self.get("reproducibility", {}).get("experiment_seed", 0))

    def profiling_enabled(self) -> bool:
        return bool(self.get("profiling", {}).get("enabled", False))

    def profiling_interval(self) -> tuple[int, int | None]:
        profiling = self.get("profiling", {})
        return (profiling["begin_on_batch"], profiling.get("end_after_batch")) if self.profiling_enabled() else (0, 0)

    def profiling_sync_timings(self) -> bool:
        return bool(self.get("profiling", {}).get("sync_timings", True))

    def get_records_per_epoch(self) -> int | None:
        records = self.get("records_per_epoch")
        return None if records is None else int(records)

    def get_min_validation_period(self) -> dict[str, Any]:
        return _require(dict, "min_validation_period", self.get("min_validation_period", {}))

    def get_min_checkpoint_period(self) -> dict[str, Any]:
        return _require(dict, "min_checkpoint_period", self.get("min_checkpoint_period", {}))

    def get_searcher_metric(self) -> str:
        return _require(str, "searcher.metric", self.get("searcher", {}).get("metric"))

    def get_optimizations_config(self) -> Any:
        return self.get("optimizations", {})

    def get_checkpoint_storage(self) -> Any:
        return self.get("checkpoint_storage", {})

    def get_entrypoint(self) -> Any:
        entrypoint = self["entrypoint"]
        if not all(isinstance(word, str) for word in (entrypoint if isinstance(entrypoint, list) else [entrypoint])):
            raise ValueError(f"entrypoint must be a string or a list of strings; got {entrypoint!r}.")
        return entrypoint


def _require(kind: type[_T], field: str, value: Any) -> _T:
    if not isinstance(value, kind):
        raise AssertionError(f"{field} must be a {kind.__name__}; got {value!r}.")
    return value
