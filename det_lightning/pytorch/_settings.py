"""The settings of a run: hyperparameters, configuration, batch sizes, aggregation."""

from __future__ import annotations

import json
import logging
from typing import Any

from det_lightning import errors
from det_lightning.masking import MaskedSettings, describe_masked, leave_out_masked, mask
from det_lightning.pytorch._configuration import RunConfiguration

logger = logging.getLogger(__name__)


class TrialSettings:
    """Hyperparameters and configuration of a trial, and the lookups that a context offers.

    A secret that is masked in either is left out, and an error names it if the trial looks it up. ``slots`` processes
    train together and share ``global_batch_size``. ``configuration`` supplies what calls leave out.
    """

    def __init__(
        self,
        hparams: dict[str, Any] | None = None,
        exp_conf: dict[str, Any] | None = None,
        trial_seed: int | None = None,
        slots: int = 1,
        aggregation_frequency: int = 1,
        average_aggregated_gradients: bool = True,
        configuration: RunConfiguration | None = None,
    ) -> None:
        self._hparams: dict[str, Any] | None = leave_out_masked(hparams, "hparams")
        self._exp_conf: dict[str, Any] | None = leave_out_masked(exp_conf, "exp_conf")
        self.configuration = configuration or RunConfiguration()
        self._trial_seed = trial_seed
        self._global_batch_size: int | None = None
        self._per_slot_batch_size: int | None = None
        if hparams and hparams.get("global_batch_size"):
            self._split_batch(hparams["global_batch_size"], slots)
        self.aggregate_over(aggregation_frequency)
        self.average_aggregated_gradients = average_aggregated_gradients

    def aggregate_over(self, batches: int) -> None:
        """Set the number of batches whose gradients make one update; raise a ValueError if it is below 1."""
        if batches < 1:
            raise ValueError(f"aggregation_frequency must be at least 1; got {batches}.")
        self.aggregation_frequency = batches

    def _split_batch(self, global_batch_size: Any, slots: int) -> None:
        if not isinstance(global_batch_size, int):
            raise errors.InvalidExperimentException(
                f"hparams['global_batch_size'] must be an integer value; got {global_batch_size!r} of type "
                f"{type(global_batch_size).__name__}."
            )
        if global_batch_size < slots:
            raise errors.InvalidExperimentException(
                f"hparams['global_batch_size'] is {global_batch_size}, less than the {slots} slots that share it. "
                "It must be greater or equal, because each slot needs at least one record per batch."
            )
        self._per_slot_batch_size = global_batch_size // slots
        self._global_batch_size = self._per_slot_batch_size * slots
        if self._global_batch_size != global_batch_size:
            logger.warning(
                "global_batch_size %d is not divisible by %d slots; %d is used.",
                global_batch_size,
                slots,
                self._global_batch_size,
            )

    def get_hparams(self) -> dict[str, Any]:
        """Return all hyperparameters; raise a ValueError if none were given."""
        if self._hparams is None:
            raise ValueError("This trial has no hparams; pass hparams={...} to init() or to TrialModule.")
        return self._hparams

    def get_hparam(self, name: str) -> Any:
        """Return the hyperparameter ``name``; raise a ValueError if there is none, or it was masked."""
        hparams = self.get_hparams()
        if isinstance(hparams, MaskedSettings) and name in hparams.masked:
            raise ValueError(hparams.explain(name))
        if name not in hparams:
            raise ValueError(f"There is no hyperparameter {name!r}; hparams has {sorted(hparams)}.")
        if name == "global_batch_size":
            logger.warning("Use get_global_batch_size() or get_per_slot_batch_size() rather than the hyperparameter.")
        return hparams[name]

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment configuration; raise a ValueError if none was given."""
        if self._exp_conf is None:
            raise ValueError("This trial has no experiment configuration; pass exp_conf={...} to init().")
        return self._exp_conf

    def get_data_config(self) -> dict[str, Any]:
        """Return the ``data`` section, maybe empty, of the configuration; raise a ValueError if there is none."""
        data: dict[str, Any] = self.get_experiment_config().get("data", {})
        return data

    def compresses_gradients(self) -> bool:
        """Return whether ``optimizations.gradient_compression`` of the experiment configuration is set."""
        optimizations = (self._exp_conf or {}).get("optimizations") or {}
        return bool(optimizations.get("gradient_compression"))

    def get_global_batch_size(self) -> int:
        """Return the number of records in a batch over all slots; raise a ValueError if hparams has none."""
        return self._require_batch_size(self._global_batch_size)

    def get_per_slot_batch_size(self) -> int:
        """Return ``global_batch_size // slots``; raise a ValueError if hparams has none."""
        return self._require_batch_size(self._per_slot_batch_size)

    def _require_batch_size(self, size: int | None) -> int:
        if size is None:
            raise ValueError("The batch size is not known; pass hparams={'global_batch_size': ...} to init().")
        return size

    def to_plain(self) -> dict[str, Any]:
        """Return ``hparams`` and ``experiment_config`` as JSON values without secrets; None for those not given."""
        found = {"hparams": mask(self._hparams), "experiment_config": mask(self._exp_conf)}
        plain: dict[str, Any] = json.loads(json.dumps(found, default=describe_masked))
        return plain

    def get_trial_seed(self) -> int:
        """Return the seed of the trial; raise an InternalException if it has none."""
        if self._trial_seed is None:
            raise errors.InternalException("The trial has no seed; pass trial_seed= to init() or to TrialModule.")
        return self._trial_seed
