"""The experiment configuration of a run, which supplies the arguments that a call leaves out."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from det_lightning import errors
from det_lightning.core._task import TrialTask
from det_lightning.hyperparameters import chosen_hparams, ranges_in
from det_lightning.masking import mask

if TYPE_CHECKING:
    from det_lightning.config import ExperimentConfig, TrainingSettings

logger = logging.getLogger(__name__)

#: A configuration as calls take it: a dict, which may be partial, or a file.
ExpConf = Mapping[str, Any] | str | os.PathLike[str]


@dataclasses.dataclass(repr=False, eq=False)  # it may contain secrets
class RunConfiguration:
    """The configuration that a run was given, if any, and what follows from it."""

    exp_conf: dict[str, Any] | None = None  # what context.get_experiment_config() returns
    hparams: dict[str, Any] | None = None  # what context.get_hparams() returns
    settings: TrainingSettings | None = None
    given: ExperimentConfig | None = None  # until it is reported

    @classmethod
    def of_call(cls, exp_conf: ExpConf | None, hparams: dict[str, Any] | None) -> RunConfiguration:
        """Return the configuration that a call was given, if any.

        Args:
            exp_conf: the configuration.
            hparams: values of hyperparameters; by default those of the configuration, with the middle of each range.

        Raises:
            ConfigError: the configuration cannot be used; all mistakes are named.
            InvalidExperimentException: an argument is of another type, or a hyperparameter is a range.
        """
        require_usable(hparams, None if isinstance(exp_conf, str | os.PathLike) else exp_conf)
        if exp_conf is None:
            return cls(None, hparams)
        from det_lightning.config import TrainingSettings, read_given

        given = read_given(exp_conf)
        if hparams is None:
            hparams = chosen_hparams(given.plain) or None
            if hparams is not None:
                logger.info("The hyperparameters are those of exp_conf; of a range the middle: %s.", mask(hparams))
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
        return cls(task.config, hparams, settings)

    def complete(self, **said: Any) -> dict[str, Any]:
        """Return the arguments of a call that have a value, which comes from the configuration if the call gives None.

        Raises:
            ValueError: the configuration gives a length in records, and there is no ``global_batch_size``.
        """
        return {**{name: value for name, value in said.items() if value is not None}, **self.missing_in(said)}

    def missing_in(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the configuration has for the arguments that are None.

        Raises:
            ValueError: see :meth:`complete`.
        """
        if self.settings is None:
            return {}
        found = {name: getattr(self.settings, name) for name, value in said.items() if value is None}
        return {name: value for name, value in found.items() if value is not None}

    def report(self, call: str, idle: Collection[str] = (), read: Collection[str] = ()) -> None:
        """Log, once, which fields of a call's configuration have no effect, and the notes from reading it.

        Args:
            call: what was given the configuration.
            idle: sections that the call ignores, in addition to those that every call ignores.
            read: fields that the trial itself reads.
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
    """Raise an InvalidExperimentException that names everything that keeps settings from being used for training."""
    given = {"hparams": hparams, "exp_conf": exp_conf}
    mistakes = [
        f"{name} must be a dict; got {mask(value)!r:.200} of type {type(value).__name__}"
        for name, value in given.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    if isinstance(hparams, Mapping):
        mistakes += [
            f"{where} describes values of a search, and is not one of them: give one, or search with "
            "`det-lightning run CONFIG`"
            for where in ranges_in(hparams)
        ]
        if hparams.get("global_batch_size") == 0:
            mistakes.append("hparams['global_batch_size'] must be an integer of at least 1; got 0")
    if mistakes:
        raise errors.InvalidExperimentException("; ".join(mistakes) + ".")
