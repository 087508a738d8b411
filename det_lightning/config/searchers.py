"""The ``searcher`` section: the trials to run, and the training length."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, SerializeAsAny, ValidationError, ValidationInfo, model_validator

from det_lightning.config.length import UNITS, MaxLength
from det_lightning.config.section import Count, Integer, Positive, Section, read_variant, refuse, variants

# 1000 to the power of 100 is a float.
_Divisor = Annotated[float, Field(gt=1, le=1000)]
_Rungs = Annotated[Positive, Field(le=100)]
_Mode = Literal["aggressive", "standard", "conservative"]


class SearcherConfig(Section):
    """The fields shared by all searches."""

    name: str
    metric: str | None = None
    smaller_is_better: bool = True
    source_trial_id: Integer | None = None
    source_checkpoint_uuid: str | None = None
    max_length: MaxLength | None = None

    @property
    def clock(self) -> str:
        """The metric that measures a trial's progress; ``batches`` if the only length has no unit."""
        return getattr(self, "time_metric", None) or (self.max_length and self.max_length.unit) or "batches"

    def doubts(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is allowed but probably a mistake, and why."""
        return iter(())


class SingleSearcher(SearcherConfig):
    """One trial; a range of hyperparameters gives a random value."""

    name: Literal["single"] = "single"


class RandomSearcher(SearcherConfig):
    """A number of trials with hyperparameters drawn at random."""

    name: Literal["random"] = "random"
    max_trials: Positive
    max_concurrent_trials: Count = 16


class GridSearcher(SearcherConfig):
    """A trial for each combination of hyperparameters."""

    name: Literal["grid"] = "grid"
    max_concurrent_trials: Count = 16


class HalvingSearcher(SearcherConfig):
    """The fields shared by both searches with early stopping."""

    max_trials: Positive
    max_time: Positive | None = None
    time_metric: str | None = None
    divisor: _Divisor = 4
    max_concurrent_trials: Count = 16
    stop_once: bool = False

    @model_validator(mode="after")
    def _has_a_length(self) -> HalvingSearcher:
        if self.max_time is not None and self.time_metric is None:
            refuse(("time_metric",), "is missing beside max_time: batches, epochs, or a metric that trials report")
        if self.time_metric is not None and self.max_time is None:
            refuse(("max_time",), f"is missing beside time_metric: how many {self.time_metric} a trial trains")
        if self.max_time is None and self.max_length is None:
            refuse(("max_time",), "is missing: write max_time and time_metric, such as 100 and batches")
        return self

    def doubts(self) -> Iterator[tuple[str, str]]:
        if self.stop_once:
            yield "stop_once", "has no effect: a stopped trial never continues"
        if self.validates_at_rungs and self.max_length is not None and self.max_length.unit is None:
            message = "counts the steps_completed of validations; to count epochs, report a metric epochs and write"
            yield "max_length", f"{message} time_metric: epochs and max_time in its place"
        if self.max_time is not None and self.max_length is not None:
            same_unit = self.max_length.unit in (None, self.time_metric)
            if not same_unit or self.max_length.units != self.max_time:
                yield "max_length", "differs from max_time, which compares trials: a trial may end earlier"

    @property
    def full_time(self) -> int:
        """The value of ``time_metric`` at the end of a complete trial; up to Determined 0.37 it was ``max_length``."""
        return self.max_time or (self.max_length.units if self.max_length else 0)

    @property
    def validates_at_rungs(self) -> bool:
        """Whether trials must validate at each decision of the search, as with ``max_length`` alone."""
        return self.max_time is None


class AdaptiveAshaSearcher(HalvingSearcher):
    """Asynchronous halving in several brackets."""

    name: Literal["adaptive_asha"] = "adaptive_asha"
    mode: _Mode = "standard"
    max_rungs: Positive = 5
    bracket_rungs: list[_Rungs] = []


class AsyncHalvingSearcher(HalvingSearcher):
    """Asynchronous halving in a single bracket."""

    name: Literal["async_halving"] = "async_halving"
    num_rungs: _Rungs


class GivenSearcher(SearcherConfig):
    """Some fields of any search, all optional, for a call that trains one trial without a search."""

    max_trials: Positive | None = None
    max_concurrent_trials: Count | None = None
    max_time: Positive | None = None
    time_metric: str | None = None
    divisor: _Divisor | None = None
    stop_once: bool | None = None
    mode: _Mode | None = None
    max_rungs: Positive | None = None
    bracket_rungs: list[_Rungs] | None = None
    num_rungs: _Rungs | None = None


SEARCHERS: dict[str, type[SearcherConfig]] = variants(
    "name", SingleSearcher, RandomSearcher, GridSearcher, AdaptiveAshaSearcher, AsyncHalvingSearcher
)

#: Unsupported searches, and the advice.
REFUSED_SEARCHERS = {
    "adaptive": "write name: adaptive_asha, and max_trials (how many trials to try) in place of budget and "
    "train_stragglers; metric, max_length, mode, divisor, max_rungs and bracket_rungs stay",
    "sync_halving": "write name: async_halving, and max_trials (how many trials to try) in place of budget and "
    "train_stragglers; metric, max_length, num_rungs and divisor stay",
    "pbt": "write name: adaptive_asha or random, with max_trials and max_length; there is no population-based training",
    "custom": "write the name of another search",
}


def change_search(searcher: dict[str, Any], kept: Collection[str]) -> None:
    """Remove the fields unknown to the named search, for example from another search, except the ``kept`` fields."""
    model = SEARCHERS.get(str(searcher.get("name")))
    if model is None:
        return
    unit = searcher.get("time_metric")
    if "max_time" not in model.model_fields and unit in UNITS and searcher.get("max_length") is None:
        searcher["max_length"] = {unit: searcher.get("max_time")}
    for name in [name for name in searcher if name not in model.model_fields and name not in kept]:
        del searcher[name]


def _read(value: Any, info: ValidationInfo) -> SearcherConfig:
    if isinstance(value, SearcherConfig):
        return value
    try:
        return read_variant(value, "name", SEARCHERS, REFUSED_SEARCHERS)
    except ValidationError:
        if not (info.context and info.context["forgiving"]):
            raise
        return read_variant(value, "name", dict.fromkeys(SEARCHERS, GivenSearcher), REFUSED_SEARCHERS)


Searcher = SingleSearcher | RandomSearcher | GridSearcher | AdaptiveAshaSearcher | AsyncHalvingSearcher
AnySearcher = Annotated[SerializeAsAny[Searcher], PlainValidator(_read)]
