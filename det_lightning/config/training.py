"""What a configuration says about the training of one trial, by the names of the arguments that would say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.length import Length
from det_lightning.units import Batch, Epoch, TrainUnit


class TrainingSettings:
    """What a configuration says for the calls of ``init`` and ``fit`` that do not say it; None where it says nothing.

    Args:
        config: the configuration.
        hparams: the hyperparameters of the trial: ``global_batch_size`` among them converts records to batches.
        trial_seed: in place of the seed of the experiment.
        checkpoint_storage: where checkpoints go: a directory, or a section of a configuration.
        rungs: lengths, in units of the search, at which it needs a validation.
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
        self._trial_seed = trial_seed
        self._rungs = rungs
        self.checkpoint_storage = checkpoint_storage

    @property
    def aggregation_frequency(self) -> int | None:
        """Number of batches for one update."""
        frequency: int | None = _said(self._config.optimizations, "aggregation_frequency")
        return frequency

    @property
    def average_aggregated_gradients(self) -> bool | None:
        """Whether the gradients of aggregated batches are averaged, not added."""
        average: bool | None = _said(self._config.optimizations, "average_aggregated_gradients")
        return average

    @property
    def trial_seed(self) -> int | None:
        """The seed of the trial; that of the experiment if a call trains it alone."""
        return _said(self._config.reproducibility, "experiment_seed") if self._trial_seed is None else self._trial_seed

    @property
    def max_length(self) -> TrainUnit | None:
        """How long to train.

        Raises:
            ValueError: it has no unit, or is in records and there is no ``global_batch_size``.
        """
        length = self._config.searcher.training_length
        return None if length is None else self._unit("searcher.max_length", length)

    @property
    def validation_period(self) -> list[TrainUnit] | None:
        """When validations are due; of several each counts.

        Raises:
            ValueError: as for :attr:`max_length`.
        """
        periods = [self._period("min_validation_period"), self._validations_for_search()]
        return [period for period in periods if period is not None] or None

    @property
    def checkpoint_period(self) -> TrainUnit | None:
        """When checkpoints are due.

        Raises:
            ValueError: as for :attr:`max_length`.
        """
        return self._period("min_checkpoint_period")

    @property
    def reporting_period(self) -> TrainUnit | None:
        """When training metrics are reported."""
        unit = _said(self._config, "scheduling_unit")
        return None if unit is None else Batch(unit)

    @property
    def checkpoint_policy(self) -> str | None:
        """After which validations to checkpoint."""
        policy: str | None = _said(self._config, "checkpoint_policy")
        return policy

    @property
    def step_zero_validation(self) -> bool | None:
        """Whether to validate before the first batch."""
        initial: bool | None = _said(self._config, "perform_initial_validation")
        return initial

    def _period(self, name: str) -> TrainUnit | None:
        period: Length | None = _said(self._config, name)
        return None if period is None else self._unit(name, period)

    def _validations_for_search(self) -> TrainUnit | None:
        length = self._config.searcher.training_length
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


def _said(section: BaseModel, name: str) -> Any:
    return getattr(section, name) if name in section.model_fields_set else None
