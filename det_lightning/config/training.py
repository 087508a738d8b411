"""The settings of a configuration for training a trial, under the names of the corresponding arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.length import Length
from det_lightning.units import Batch, Epoch, TrainUnit


class TrainingSettings:
    """Values of a configuration for arguments missing in ``init`` and ``fit``; None for values not in the file.

    ``global_batch_size`` among ``hparams`` converts records to batches. ``trial_seed`` replaces the experiment's seed.
    ``rungs`` are the lengths with a validation for the search, in units of the search.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        hparams: Mapping[str, Any] | None = None,
        *,
        trial_seed: int | None = None,
        checkpoint_storage: str | Mapping[str, Any] | None = None,
        rungs: Sequence[int] = (),
    ) -> None:
        self._config = config
        self._hparams = hparams or {}
        self._rungs = rungs
        seed = _get_if_given(config.reproducibility, "experiment_seed") if trial_seed is None else trial_seed
        optimizations = config.optimizations
        self.trial_seed: int | None = seed
        self.checkpoint_storage = checkpoint_storage
        self.aggregation_frequency: int | None = _get_if_given(optimizations, "aggregation_frequency")
        self.average_aggregated_gradients: bool | None = _get_if_given(optimizations, "average_aggregated_gradients")
        self.checkpoint_policy: str | None = _get_if_given(config, "checkpoint_policy")
        self.step_zero_validation: bool | None = _get_if_given(config, "perform_initial_validation")

    @property
    def max_length(self) -> TrainUnit | None:
        """The training length. Raises a ValueError for a missing unit, or records without batch size."""
        length = self._search_length()
        return None if length is None else self._unit("searcher.max_length", length)

    @property
    def validation_period(self) -> list[TrainUnit] | None:
        """The periods between validations; a validation is due after each period."""
        periods = [self._period("min_validation_period"), self._validations_for_search()]
        return [period for period in periods if period is not None] or None

    @property
    def checkpoint_period(self) -> TrainUnit | None:
        return self._period("min_checkpoint_period")

    @property
    def reporting_period(self) -> TrainUnit | None:
        unit = _get_if_given(self._config, "scheduling_unit")
        return None if unit is None else Batch(unit)

    def _period(self, name: str) -> TrainUnit | None:
        period: Length | None = _get_if_given(self._config, name)
        return None if period is None else self._unit(name, period)

    def _search_length(self) -> Length | None:
        searcher = self._config.searcher
        max_time: int | None = getattr(searcher, "max_time", None)
        unit: str | None = getattr(searcher, "time_metric", None)
        if searcher.max_length is None and max_time is not None and unit in ("batches", "epochs"):
            return Length(max_time, "epochs" if unit == "epochs" else "batches")
        return searcher.max_length

    def _validations_for_search(self) -> TrainUnit | None:
        length = self._search_length()
        if not self._rungs or length is None:
            return None
        if length.unit == "epochs":
            return Epoch(tuple(self._rungs))
        units = [self._unit("searcher", Length(rung, length.unit or "batches")) for rung in self._rungs]
        return Batch([batches for unit in units if isinstance(batches := unit.value, int)])

    def _unit(self, name: str, length: Length) -> TrainUnit:
        batch_size = self._hparams.get("global_batch_size")
        try:
            return length.train_unit(batch_size if isinstance(batch_size, int) else None)
        except ValueError as e:
            raise ValueError(f"{name} of the configuration: {e}") from None


def _get_if_given(section: BaseModel, name: str) -> Any:
    return getattr(section, name) if name in section.model_fields_set else None
