"""The settings of a search: their conversion from earlier releases, and the mistakes in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

#: Search methods that earlier releases had, and what to write instead.
_REMOVED = {
    "adaptive": "write adaptive_asha, with max_trials in place of budget",
    "sync_halving": "write async_halving, with max_trials in place of budget",
    "pbt": "write adaptive_asha or random, with max_trials",
    "custom": "write random, grid or adaptive_asha",
}
_HALVING = ("adaptive_asha", "async_halving")
_METHODS = ("single", "random", "grid", *_HALVING)
_MODES = ("aggressive", "standard", "conservative")


@dataclass(frozen=True)
class Length:
    """A training length: a number of ``records``, ``batches`` or ``epochs``, or one without a unit."""

    units: int
    unit: str | None = None


@dataclass(frozen=True)
class SearcherSettings:
    """The ``searcher`` section of an experiment configuration, with Determined's defaults.

    A 0 or an empty string stands for a value that the configuration leaves out.

    Attributes:
        max_concurrent_trials: how many trials the search has at once; 0 means as many as it can use.
        max_time, time_metric: how long the halving methods let a trial train, measured by a metric that comes with
            each validation, such as ``batches`` or ``epochs``.
        max_length: the same in configurations of earlier releases, which have no ``time_metric``.
        bracket_rungs: the number of rungs of each bracket, in place of those that follow from ``mode``.
        num_rungs: the number of rungs of the only bracket of ``async_halving``.
        force_validations: trials of the halving methods validate at the lengths of the rungs; otherwise a trial that
            validates only at its end is never stopped early. Always on if only ``max_length`` is set, as in earlier
            releases.
    """

    name: str
    metric: str
    smaller_is_better: bool = True
    max_trials: int = 0
    max_concurrent_trials: int = 16
    max_time: int = 0
    time_metric: str = ""
    max_length: Length | None = None
    mode: str = "standard"
    divisor: float = 4.0
    max_rungs: int = 5
    bracket_rungs: tuple[int, ...] = ()
    num_rungs: int = 0
    force_validations: bool = False


def converted(settings: SearcherSettings) -> tuple[SearcherSettings, list[str]]:
    """Return the settings in the terms of Determined 0.38.1, and warnings about possible surprises."""
    warnings: list[str] = []
    if settings.name == "adaptive_simple":
        settings = replace(settings, name="adaptive_asha")
        warnings.append("searcher.name: Determined removed adaptive_simple in 0.15; adaptive_asha runs in its place.")
    length = settings.max_length
    if settings.name not in _HALVING or length is None:
        return settings, warnings
    unit = length.unit or "batches"
    if not settings.max_time and not settings.time_metric:
        if length.unit is None:
            warnings.append("searcher.max_length has no unit; it is taken as a number of batches.")
        settings = replace(settings, max_time=length.units, time_metric=unit, force_validations=True)
    elif unit == settings.time_metric and length.units != settings.max_time:
        warnings.append(
            f"searcher.max_length is {length.units} {unit} and max_time is {settings.max_time}: a trial that ends by "
            "itself before max_time is not followed by another one, so there may be fewer than max_trials."
        )
    return settings, warnings


def settings_mistakes(settings: SearcherSettings) -> list[str]:
    """Return what is wrong with converted settings."""
    if settings.name in _REMOVED:
        return [f"searcher.name: Determined removed {settings.name}; {_REMOVED[settings.name]}"]
    if settings.name not in _METHODS:
        return [f"searcher.name is {settings.name!r}; expected one of {', '.join(_METHODS)}"]
    at_least = {"max_concurrent_trials": 0}
    if settings.name in ("random", *_HALVING):
        at_least["max_trials"] = 1
    if settings.name in _HALVING:
        at_least["max_time"] = 1
        at_least["num_rungs" if settings.name == "async_halving" else "max_rungs"] = 1
    found = [
        f"searcher.{field} is missing or too small; {settings.name} needs at least {least}"
        for field, least in at_least.items()
        if getattr(settings, field) < least
    ]
    return found + _halving_mistakes(settings) if settings.name in _HALVING else found


def _halving_mistakes(settings: SearcherSettings) -> list[str]:
    found: list[str] = []
    if not settings.time_metric:
        found.append(f"searcher.time_metric is missing; {settings.name} needs it with max_time, or max_length alone")
    if settings.mode not in _MODES:
        found.append(f"searcher.mode is {settings.mode!r}; expected one of {', '.join(_MODES)}")
    if any(rungs < 1 for rungs in settings.bracket_rungs):
        found.append(f"searcher.bracket_rungs is {list(settings.bracket_rungs)}; expected numbers of at least 1")
    if not 1 < settings.divisor < math.inf:
        found.append(f"searcher.divisor is {settings.divisor}; expected a number above 1")
    elif max(settings.num_rungs, *settings.bracket_rungs, 0) * math.log(settings.divisor) > 700:
        found.append(
            f"searcher.divisor is {settings.divisor}: its powers for {settings.num_rungs or settings.bracket_rungs} "
            "rungs are too large for a float"
        )
    return found
