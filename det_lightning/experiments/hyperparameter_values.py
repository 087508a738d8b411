"""The hyperparameters that differ between the trials of an experiment, for comparing the trials."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.hyperparameters import flatten
from det_lightning.masking import mask

# Keeps the difference of any two values finite.
_LARGEST = 1e300


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """A hyperparameter that differs between trials, with its values by trial id; None for a trial without it."""

    name: str
    values: Mapping[int, Any]
    is_log: bool = False  # whether the search draws its logarithm

    @property
    def is_number(self) -> bool:
        """Whether all values are numbers that a chart can show."""
        return all(_can_be_drawn(value) for value in self.values.values())

    def of(self, trials: Sequence[TrialRecord]) -> list[Any]:
        """Return its values in ``trials``, as text unless all are numbers."""
        values = [self.values[trial.trial_id] for trial in trials]
        return values if self.is_number else [str(value) for value in values]

    def scaled(self, value: float) -> float:
        """Return a value's position on an evenly divided axis."""
        return math.log10(value) if self.is_log else value

    def unscaled(self, value: float) -> float:
        """Return the value at a position on that axis."""
        return 10**value if self.is_log else value


def varying_hyperparameters(config: Mapping[str, Any], state: ExperimentState) -> list[Hyperparameter]:
    """Return the hyperparameters that differ between trials, by name. Secrets are masked, and so left out."""
    hparams = {trial.trial_id: flatten(mask(trial.hparams)) for trial in state.trials.values()}
    logarithmic = set(_logarithmic(config.get("hyperparameters") or {}))
    found = []
    for name in sorted({name for values in hparams.values() for name in values}):
        values = {trial_id: values.get(name) for trial_id, values in hparams.items()}
        if len({repr(value) for value in values.values()}) > 1:
            has_logarithms = all(_can_be_drawn(value) and value > 0 for value in values.values())
            found.append(Hyperparameter(name, values, name in logarithmic and has_logarithms))
    return found


def _can_be_drawn(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _logarithmic(entries: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of the hyperparameters whose logarithms the search draws."""
    for name, entry in entries.items():
        if not isinstance(entry, Mapping):
            continue
        if "type" not in entry:
            yield from _logarithmic(entry, f"{prefix}{name}.")
        elif entry["type"] == "log":
            yield f"{prefix}{name}"
