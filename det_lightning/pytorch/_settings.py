"""Decides the settings of a run by its arguments and configuration: hyperparameters, batch sizes, aggregation.

Change here: the messages about missing settings; ``det_lightning/testing/training/requirements.py`` knows them by their
first words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any

from det_lightning import errors
from det_lightning.arguments import describe, suggest, wrong_argument
from det_lightning.core._task import TrialTask
from det_lightning.escaping import get_logger
from det_lightning.files.plain_values import MOST_IN_SETTINGS, as_plain
from det_lightning.hyperparameters import choose_hparams, find_ranges
from det_lightning.masking import is_masked, mask_settings
from det_lightning.pytorch._random_state import require_seed

if TYPE_CHECKING:
    from det_lightning.config import ExperimentConfig, TrainingSettings

logger = get_logger(__name__)

#: The type of ``exp_conf`` in calls: a dict, which may be partial, or a file.
ExpConf = Mapping[str, Any] | str | os.PathLike[str]


@dataclasses.dataclass(repr=False, eq=False)  # it may contain secrets
class RunConfiguration:
    """The configuration of a run, if any, with the hyperparameters and settings derived from the configuration."""

    exp_conf: dict[str, Any] | None = None  # for context.get_experiment_config()
    hparams: dict[str, Any] | None = None  # for context.get_hparams()
    settings: TrainingSettings | None = None
    given: ExperimentConfig | None = None  # until it is reported
    source: str = "hparams={...} of init() or TrialModule"  # of the hyperparameters, for messages

    @classmethod
    def of_call(cls, exp_conf: ExpConf | None, hparams: dict[str, Any] | None) -> RunConfiguration:
        """Return the configuration given to a call, if any.

        ``hparams`` default to the configuration's, with the middle of each range.

        Raises:
            ConfigError, InvalidExperimentException: an argument cannot be used; all mistakes are named.
        """
        require_usable(hparams, None if isinstance(exp_conf, str | os.PathLike) else exp_conf)
        if exp_conf is None:
            return cls(None, hparams)
        from det_lightning.config import TrainingSettings, read_given

        given = read_given(exp_conf)
        if hparams is None:
            hparams = choose_hparams(given.plain) or None
            if hparams is not None:
                logger.info("The hyperparameters come from exp_conf, with the middle of each range: %s.", hparams)
        settings = TrainingSettings(given.typed, hparams, checkpoint_storage=given.checkpoint_storage)
        return cls(given.plain, hparams, settings, given.typed)

    @classmethod
    def of_task(cls, task: TrialTask, hparams: dict[str, Any] | None) -> RunConfiguration:
        """Return the configuration of a trial of an experiment."""
        from det_lightning.config import TrainingSettings, read_given

        hparams = task.hparams if hparams is None else hparams
        settings = TrainingSettings(
            read_given(task.config).typed,
            hparams,
            trial_seed=task.trial_seed,
            checkpoint_storage=task.checkpoint_storage,
            rungs=task.validate_at,
        )
        return cls(task.config, hparams, settings, source="`hyperparameters` of the experiment's configuration")

    def complete(self, **said: Any) -> dict[str, Any]:
        """Return the arguments of a call, completed by the configuration; those that are still None are left out.

        Raise a ValueError if the configuration gives a length in records, and there is no ``global_batch_size``.
        """
        return {**{name: value for name, value in said.items() if value is not None}, **self.find_missing(said)}

    def find_missing(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration's values for the arguments that are None; see :meth:`complete`."""
        if self.settings is None:
            return {}
        missing = [name for name, value in said.items() if value is None]
        return {name: value for name in missing if (value := getattr(self.settings, name)) is not None}

    def report(self, call: str, idle: Collection[str] = (), read: Collection[str] = ()) -> None:
        """Log, once, the notes on a call's configuration and its fields without effect.

        The call also ignores the sections ``idle``; the trial reads the fields ``read``.
        """
        if self.given is None:
            return
        from det_lightning.config import without_effect_in_calls

        for note in self.given.notes:
            logger.info("exp_conf: %s", note)
        fields = without_effect_in_calls(self.given, idle=idle, read=read)
        named = [*fields, *map(str, self.given.unknown_keys)]
        if named:
            logger.warning("Of the exp_conf of %s these fields have no effect here: %s.", call, "; ".join(named))
        self.given = None


def require_usable(hparams: Any, exp_conf: Any) -> None:
    """Raise an InvalidExperimentException that names every mistake in settings for training."""
    given = {"hparams": hparams, "exp_conf": exp_conf}
    mistakes = [
        f"{name} must be a dict; got {describe(value)}"
        for name, value in given.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    if isinstance(hparams, Mapping):
        mistakes += [
            f"{where} describes values of a search: pass a value, or search with `det-lightning run CONFIG`"
            for where in find_ranges(hparams)
        ]
        if hparams.get("global_batch_size") == 0:
            mistakes.append("hparams['global_batch_size'] must be an integer of at least 1; got 0")
    if mistakes:
        raise errors.InvalidExperimentException("; ".join(mistakes) + ".")


class TrialSettings:
    """Hyperparameters and configuration of a trial, and the lookups of a context.

    ``slots`` processes share ``global_batch_size``. ``configuration`` has defaults for arguments left out of calls.
    ``hparams`` and ``exp_conf`` are dicts that the trial may change, or None, as ``trial_seed`` and
    ``per_slot_batch_size`` may be.
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
        self.hparams = hparams
        self.exp_conf = exp_conf
        self.configuration = configuration or RunConfiguration()
        if trial_seed is not None:
            require_seed(trial_seed)
        self.trial_seed = trial_seed
        self._slots = slots
        global_batch_size = (hparams or {}).get("global_batch_size")
        self.per_slot_batch_size = _size_per_slot(global_batch_size, slots) if global_batch_size else None
        self.aggregate_over(aggregation_frequency)
        self.average_aggregated_gradients = average_aggregated_gradients

    def aggregate_over(self, batches: int) -> None:
        """Set the number of batches whose gradients make one update; raise a ValueError unless whole and at least 1."""
        if not isinstance(batches, Number):
            raise TypeError(wrong_argument("aggregation_frequency", "a number of batches", batches))
        if batches < 1 or batches % 1:
            raise ValueError(f"aggregation_frequency must be a whole number, at least 1; got {batches}.")
        self.aggregation_frequency = batches

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the experiment configuration; an empty dict if there is none."""
        section: dict[str, Any] = (self.exp_conf or {}).get(name) or {}
        return section

    def get_global_batch_size(self) -> int:
        return self.get_per_slot_batch_size() * self._slots

    def get_per_slot_batch_size(self) -> int:
        if self.per_slot_batch_size is None:
            raise ValueError(f"The batch size is unknown. {self.explain_missing('global_batch_size')}")
        return self.per_slot_batch_size

    def explain_missing(self, name: str) -> str:
        """Return a sentence about a missing hyperparameter that names similar ones."""
        hint = suggest(name, self.hparams or {})
        return f"There is no hyperparameter {name!r} in {self.configuration.source}{hint or '.'}"

    def to_plain(self, losses: list[str] | None = None) -> dict[str, Any]:
        """Return ``hparams`` and ``experiment_config`` as JSON values without secrets; None for a missing dict.

        Values that JSON cannot hold are left out and noted in ``losses``.
        """
        given = {"hparams": self.hparams, "experiment_config": self.exp_conf}
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            if (plain := json.loads(json.dumps(given, allow_nan=False))) == given:  # nothing is lost
                return mask_settings(plain)
        losses = [] if losses is None else losses
        return mask_settings(
            {name: as_plain(settings, name, losses, MOST_IN_SETTINGS) for name, settings in given.items()}
        )


class SettingsLookups:
    """The lookups of a context in its settings."""

    settings: TrialSettings

    def get_experiment_id(self) -> int:
        """Return 0: there are no experiments without a master."""
        return 0

    def get_trial_id(self) -> int:
        """Return 0, the id that Determined gives to a local trial."""
        return 0

    def get_hparams(self) -> dict[str, Any]:
        """Return all hyperparameters; raise a ValueError if the run has none."""
        if self.settings.hparams is None:
            raise ValueError(f"This trial has no hparams; write them into {self.settings.configuration.source}.")
        return self.settings.hparams

    def get_hparam(self, name: str) -> Any:
        """Return the hyperparameter ``name``; raise a ValueError if it is missing or masked."""
        hparams = self.get_hparams()
        if name not in hparams:
            raise ValueError(self.settings.explain_missing(name))
        if is_masked(hparams[name]):
            raise ValueError(f"The hyperparameter {name!r} is masked in the checkpoint: pass its value in hparams=.")
        if name == "global_batch_size":
            logger.warning("Use get_global_batch_size() or get_per_slot_batch_size() rather than the hyperparameter.")
        return hparams[name]

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment configuration; raise a ValueError if the run has none."""
        if self.settings.exp_conf is None:
            raise ValueError("This trial has no experiment configuration; pass exp_conf={...} to init().")
        return self.settings.exp_conf

    def get_data_config(self) -> dict[str, Any]:
        """Return the configuration's ``data`` section, maybe empty; raise a ValueError without a configuration."""
        data: dict[str, Any] = self.get_experiment_config().get("data", {})
        return data

    def get_global_batch_size(self) -> int:
        """Return the number of records in a batch over all slots; raise a ValueError if hparams has none."""
        return self.settings.get_global_batch_size()

    def get_per_slot_batch_size(self) -> int:
        """Return ``global_batch_size // slots``; raise a ValueError if hparams has none."""
        return self.settings.get_per_slot_batch_size()

    def get_trial_seed(self) -> int:
        """Return the seed of the trial; raise an InternalException if it has none."""
        if self.settings.trial_seed is None:
            raise errors.InternalException("The trial has no seed; pass trial_seed= to init() or to TrialModule.")
        return self.settings.trial_seed


def _size_per_slot(global_batch_size: Any, slots: int) -> int:
    if not isinstance(global_batch_size, int):
        raise errors.InvalidExperimentException(
            f"hparams['global_batch_size'] must be an integer; got {global_batch_size!r} of type "
            f"{type(global_batch_size).__name__}."
        )
    if global_batch_size < slots:
        raise errors.InvalidExperimentException(
            f"hparams['global_batch_size'] is {global_batch_size}, less than the number of slots, {slots}; each slot "
            "needs at least one record per batch."
        )
    size, left_over = divmod(global_batch_size, slots)
    if left_over:
        used = size * slots
        logger.warning("global_batch_size %d is not divisible by %d slots; %d is used.", global_batch_size, slots, used)
    return size
