"""Lengths and periods of training: a number of batches, epochs or records."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator

from det_lightning.arguments import suggest
from det_lightning.config.section import INTEGER_LIMIT, refuse, show_value
from det_lightning.units import Batch, Epoch, TrainUnit

#: The units of a length, as keys in a mapping.
UNITS = ("batches", "epochs", "records")


@dataclasses.dataclass(frozen=True)
class Length:
    """A length or a period of training."""

    units: int
    unit: Literal["batches", "epochs", "records"] | None  # None for a bare number, for scripts only

    def as_plain(self) -> dict[str, int] | int:
        """Return the length as written in a configuration."""
        return self.units if self.unit is None else {self.unit: self.units}

    def train_unit(self, global_batch_size: int | None = None) -> TrainUnit:
        """Return the length or period for ``Trainer.fit``; 0 means never, as in a configuration.

        Raises a ValueError for a length without a unit, and for records without a ``global_batch_size`` to convert by.
        """
        if self.unit == "records" and self.units and global_batch_size is None:
            raise ValueError(f"{self.units} records cannot be converted to batches without global_batch_size.")
        if self.unit is None:
            raise ValueError(f"{self.units} is not a length of training: it has no unit, such as {{batches: ...}}.")
        units = self.units or sys.maxsize
        if self.unit == "epochs":
            return Epoch(units)
        if self.unit == "records" and self.units:
            units = max(self.units // (global_batch_size or 1), 1)
        return Batch(units)


def _read(value: Any, least: int, bare: bool) -> Length:
    if isinstance(value, Length):
        return value
    if bare and isinstance(value, int | float) and not isinstance(value, bool):
        value = {None: value}
    if not isinstance(value, dict) or len(given := {u: n for u, n in value.items() if n is not None}) != 1:
        refuse((), f"must be one of {{batches: N}}, {{epochs: N}} and {{records: N}}; got {show_value(value)}")
    ((unit, units),) = given.items()
    path = () if unit is None else (unit,)
    if unit not in (*UNITS, None):
        refuse(path, f"unknown unit{suggest(unit, UNITS)}")
    if isinstance(units, bool) or not isinstance(units, int | float) or units != int(units) or units < least:
        refuse(path, f"must be an integer, at least {least}; got {show_value(units)}")
    if units >= INTEGER_LIMIT:
        refuse(path, f"must be less than {INTEGER_LIMIT}; got {show_value(units)}")
    return Length(int(units), unit)


_serialized = PlainSerializer(Length.as_plain)
Period = Annotated[Length, PlainValidator(functools.partial(_read, least=0, bare=False)), _serialized]
MaxLength = Annotated[Length, PlainValidator(functools.partial(_read, least=1, bare=True)), _serialized]
