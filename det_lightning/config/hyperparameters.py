"""The hyperparameters of a configuration: constants, ranges, choices, and groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails
from typing_extensions import TypeAliasType

from det_lightning.config.section import (
    UNTYPED,
    Integer,
    Positive,
    Section,
    collect_mistakes,
    raise_all,
    read_variant,
    refuse,
    show_value,
    variants,
)

# All values of a grid are in memory.
_MOST_VALUES = 1_000_000
# A range of integers is drawn from with 63 bits.
_WIDEST = 2**63
# The exponent of e for the largest float.
_LARGEST_EXPONENT = 709


class Const(Section):
    """A constant, also written as a bare value."""

    type: Literal["const"] = "const"
    val: Annotated[Any, UNTYPED]


class Categorical(Section):
    """A choice among values of any type known to JSON."""

    type: Literal["categorical"] = "categorical"
    vals: Annotated[list[Any], Field(min_length=1), UNTYPED]


class _Range(Section):
    type: str
    minval: float
    maxval: float
    #: How many values a grid takes from the range.
    count: Positive | None = None

    @model_serializer(mode="wrap")
    def _without_empty_count(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        entries: dict[str, Any] = serialize(self)
        return {name: value for name, value in entries.items() if name != "count" or value is not None}

    @model_validator(mode="after")
    def _minimum_below_maximum(self) -> _Range:
        if self.minval >= self.maxval:
            refuse(("maxval",), f"must be greater than minval, {self.minval}; got {self.maxval}")
        if not math.isfinite((self.maxval - self.minval) * max(self.values_of_grid(), 1)):
            refuse(("maxval",), f"must be closer to minval, {self.minval}; got {self.maxval}")
        if self.values_of_grid() > _MOST_VALUES:
            refuse(("count",), f"must be at most {_MOST_VALUES}; got {self.count}")
        return self

    def values_of_grid(self) -> int:
        """Return how many values a grid takes."""
        return self.count or 0


class Int(_Range):
    """An integer from ``minval`` to ``maxval``, inclusive."""

    type: Literal["int"] = "int"
    minval: Integer
    maxval: Integer

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Int:
        if self.maxval - self.minval >= _WIDEST:
            refuse(("maxval",), f"must be less than 2**63 above minval, {self.minval}; got {self.maxval}")
        return self

    def values_of_grid(self) -> int:
        return min(super().values_of_grid(), self.maxval - self.minval + 1)


class Double(_Range):
    """A number from ``minval`` to ``maxval``."""

    type: Literal["double"] = "double"


class Log(_Range):
    """``base`` to the power of a number from ``minval`` to ``maxval``."""

    type: Literal["log"] = "log"
    base: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _has_finite_powers(self) -> Log:
        for name, exponent in (("minval", self.minval), ("maxval", self.maxval)):
            if exponent * math.log(self.base) > _LARGEST_EXPONENT:
                refuse((name,), f"is too large an exponent of the base, {self.base:g}; got {exponent:g}")
        return self


Leaf = Const | Categorical | Int | Double | Log
Hyperparameter = TypeAliasType("Hyperparameter", "Leaf | dict[str, Hyperparameter]")
_MODELS: dict[str, type[Leaf]] = variants("type", Const, Int, Double, Log, Categorical)


def _read_group(entries: Any) -> dict[str, Hyperparameter]:
    if not isinstance(entries, dict):
        refuse((), f"must be a mapping; got {show_value(entries)}")
    mistakes: list[InitErrorDetails] = []
    group: dict[str, Hyperparameter] = {}
    for name, entry in entries.items():
        try:
            group[name] = _read_entry(entry)
        except ValidationError as e:
            mistakes += collect_mistakes(e, (name,))
    raise_all(mistakes)
    return group


def _read_entry(entry: Any) -> Hyperparameter:
    if isinstance(entry, Section):
        return entry  # type: ignore[return-value]  # a configuration built in Python
    if not isinstance(entry, dict):
        return Const(val=entry)
    if "type" not in entry:
        return _read_group(entry)
    if isinstance(entry["type"], dict):
        refuse(("type",), "a group cannot have a member named type")
    return read_variant(entry, "type", _MODELS)


def _as_plain(entry: Hyperparameter) -> dict[str, Any]:
    if isinstance(entry, dict):
        return {name: _as_plain(member) for name, member in entry.items()}
    return entry.model_dump()


def leaves(group: dict[str, Hyperparameter], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    """Yield each hyperparameter except groups, after the path of names."""
    for name, entry in group.items():
        if isinstance(entry, dict):
            yield from leaves(entry, (*path, name))
        else:
            yield (*path, name), entry


def list_doubts(
    group: dict[str, Hyperparameter], path: tuple[str, ...] = ("hyperparameters",)
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each entry that is probably a mistake, and why."""
    for name, entry in group.items():
        here = (*path, name)
        if isinstance(entry, dict) and (entry.keys() >= {"minval", "maxval"} or entry.keys() == {"vals"}):
            yield here, "is a group of hyperparameters; a range needs a type: int, double, log or categorical"
        elif isinstance(entry, dict):
            yield from list_doubts(entry, here)
        elif isinstance(entry, Log) and 0 < entry.minval < entry.maxval <= 1:
            least, most = entry.base**entry.minval, entry.base**entry.maxval
            yield here, f"is drawn from {least:.4g} to {most:.4g}: minval and maxval are exponents, such as -4 and -1"


#: A mapping of names to hyperparameters and groups.
Hyperparameters = Annotated[dict[str, Hyperparameter], PlainValidator(_read_group), PlainSerializer(_as_plain)]
