"""Comparison of two recorded trainings: the first difference and its size.

Change here: ``_KINDS`` has the fields of an event that are compared. ``det_lightning/testing/recorder.py`` writes them;
``det_lightning/testing/records/difference.py`` has the usual causes and the tolerances.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from det_lightning.masking import mask_config
from det_lightning.testing.records.difference import (
    BIT_EQUAL,
    Difference,
    Tolerance,
    choose_tolerance,
)
from det_lightning.testing.records.record import (
    RunSettings,
    TrainingRecord,
    distance,
    get_kind,
    read_dtype,
    read_number,
    summarize_value,
)

# The kinds of differences by the field of the event, in the order in which the values arise.
_KINDS = {
    "epoch": "epoch",
    "data": "data",
    "learning_rates": "learning rate",
    "metrics": "metric",
    "reported": "metric",
    "gradients": "gradient",
    "parameters": "parameter",
    "weights": "parameter",
    "optimizers": "optimizer state",
    "schedulers": "scheduler state",
    "arguments": "callback",
    "callbacks": "callback state",
    "random": "random state",
}
# The kinds that other kernels of torch leave nearly as they are.
_OF_ANY_ENVIRONMENT = ("epoch", "data", "learning rate", "metric", "callback")
_Part = tuple[str, float, float]  # of a value: its name, and the number in it on each side
_TITLES = {"epoch": "index", "data": "batch", "learning_rates": "group"}


def first_difference(
    reference: TrainingRecord, ours: TrainingRecord, tolerance: Tolerance | None = None
) -> Difference | None:
    """Return the earliest difference between two records; the tolerance defaults to :func:`choose_tolerance`."""
    comparison = _Comparison(reference, ours, tolerance or choose_tolerance(reference, ours))
    differences = comparison.differences()
    first = next(differences, None)
    if first is None:
        return None
    others: dict[str, dict[str, None]] = {}  # at the same batch, names by kind
    for other in itertools.takewhile(lambda difference: difference.batch == first.batch, differences):
        if (other.kind, other.name) != (first.kind, first.name):
            others.setdefault(other.kind, {})[other.name] = None
    more = {kind: f" and {len(names) - 1} more" if len(names) > 1 else "" for kind, names in others.items()}
    return dataclasses.replace(
        first,
        also=tuple(f"{kind} {next(iter(names))}{more[kind]}" for kind, names in others.items()),
    )


def value_differences(
    kind: str, name: str, theirs: Any, mine: Any, tolerance: Tolerance = BIT_EQUAL
) -> Iterator[Difference]:
    """Yield the differences beyond the tolerance between two described values; names are paths into nested values."""
    if nested := _pair_items(name, theirs, mine):
        for inner, (theirs_within, mine_within) in nested.items():
            yield from value_differences(kind, inner, theirs_within, mine_within, tolerance)
        return
    one = read_number(theirs)
    other = read_number(mine)
    far: _Part | None = None
    if one is not None and other is not None:
        far = None if tolerance.allows(one, other) else ("", one, other)
        same = not tolerance.exact or read_dtype(theirs) == read_dtype(mine)
    elif get_kind(theirs) == "array" == get_kind(mine) and theirs["shape"] == mine["shape"]:
        equal = theirs["digest"] == mine["digest"] and theirs["dtype"] == mine["dtype"]
        far = None if equal else _find_farthest(theirs, mine, tolerance)
        same = equal or not tolerance.exact
    else:
        same = theirs == mine
    if far is not None:
        part, one, other = far
        apart = distance(one, other)
        largest = max(abs(one), abs(other))
        relative = apart / largest if largest else None
        yield Difference(kind, name, None, one, other, part, apart, relative, tolerance)
    elif not same:
        yield Difference(kind, name, None, summarize_value(theirs), summarize_value(mine), tolerance=tolerance)


def _pair_items(name: str, theirs: Any, mine: Any) -> dict[str, tuple[Any, Any]]:
    if get_kind(theirs) == "dict" == get_kind(mine):
        keys = dict.fromkeys([*theirs, *mine])
        return {f"{name}.{key}" if name else key: (theirs.get(key), mine.get(key)) for key in keys}
    if isinstance(theirs, list) and isinstance(mine, list) and len(theirs) == len(mine):
        return {f"{name}[{index}]": pair for index, pair in enumerate(zip(theirs, mine, strict=True))}
    return {}


def _find_farthest(theirs: Any, mine: Any, tolerance: Tolerance) -> _Part | None:
    """Return the element, else the statistic, with the largest distance between two arrays, and both values."""
    size = math.prod(theirs["shape"])
    scale = max((abs(array.get(end, 0.0)) for array in (theirs, mine) for end in ("minimum", "maximum")), default=0.0)
    sampled = list(zip(theirs.get("sample", ()), mine.get("sample", ()), strict=False))
    found = [
        (f"element {int(index * (size - 1) / max(1, len(sampled) - 1))} of {size}", one, other)
        for index, (one, other) in enumerate(sampled)
        if not tolerance.allows(one, other, scale)
    ]
    if not found:
        statistics = {"norm": scale * math.sqrt(size), "mean": scale, "minimum": scale, "maximum": scale}
        found = [
            (name, theirs[name], mine[name])
            for name, scale in statistics.items()
            if name in theirs and name in mine and not tolerance.allows(theirs[name], mine[name], scale)
        ]
    return max(found, key=lambda part: distance(part[1], part[2]), default=None)


class _Comparison:
    def __init__(self, reference: TrainingRecord, ours: TrainingRecord, tolerance: Tolerance) -> None:
        self._records = (reference, ours)
        self._tolerance = tolerance
        self._is_same_environment = choose_tolerance(reference, ours).exact
        # A part of a record may lack its start.
        events = [event for record in self._records for event in record.events]
        fields = {"start": "parameters", "batch_end": "gradients"}
        self._parameters = {n for e in events if (field := fields.get(e["event"])) is not None for n in e[field]}

    def differences(self) -> Iterator[Difference]:
        """Yield all differences in chronological order, until the sequences of events diverge."""
        for field in dataclasses.fields(RunSettings):
            settings = [getattr(record.settings, field.name) for record in self._records]
            if settings[0] != settings[1]:
                shown = list(map(mask_config, settings)) if field.name == "config" else settings
                yield self._difference("settings", field.name, None, shown)
        # Hooks that the other Determined lacks are left out.
        hooks = set.intersection(*(set(record.environment.get("hooks", ())) for record in self._records))
        comparable = [
            [event for event in record.events if event["event"] != "callback" or event["name"] in hooks]
            for record in self._records
        ]
        for pair in itertools.zip_longest(*comparable):
            labels = [None if event is None else str(event.get("name", event["event"])) for event in pair]
            if labels[0] != labels[1]:
                batch = min(event["batch"] for event in pair if event is not None)
                name = str(labels[0] or labels[1])
                yield from self._ends(batch) or [self._difference("callback", name, batch, labels)]
                return
            yield from self._compare_events(*pair)
        yield from self._ends()

    def _ends(self, batch: int | None = None) -> list[Difference]:
        """Return the difference between the ends of two trainings that diverge at ``batch``."""
        errors = [record.error or {} for record in self._records]
        lengths = [record.batches for record in self._records]
        if errors[0].get("type") != errors[1].get("type"):
            texts = [f"{error['type']}: {error['message']}" if error else None for error in errors]
            name = next(error["type"] for error in errors if error)
            return [self._difference("error", name, min(lengths) if batch is None else batch, texts)]
        if lengths[0] != lengths[1]:
            return [self._difference("number of batches", "trained", min(lengths), lengths)]
        return []

    def _compare_events(self, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[Difference]:
        for field, kind in _KINDS.items():
            is_compared = self._is_same_environment or kind in _OF_ANY_ENVIRONMENT
            if not is_compared or field not in theirs or field not in mine:
                continue
            pair = (theirs[field], mine[field])
            for difference in value_differences(kind, _TITLES.get(field, ""), *pair, self._tolerance.of(kind)):
                yield dataclasses.replace(self._specify(difference, theirs), batch=theirs["batch"])

    def _specify(self, difference: Difference, event: Mapping[str, Any]) -> Difference:
        """Return the difference with the kind and name that follow from the event."""
        changes: dict[str, Any] = {}
        if event["event"] == "validation":
            changes = {"kind": "validation metric"}
        elif event["event"] != "callback":
            if difference.kind == "parameter" and difference.name not in self._parameters:
                changes = {"kind": "buffer"}
        elif found := re.fullmatch(r"outputs\[(\d+)\]\.(.+)", difference.name):  # what a hook received
            changes = {"kind": "validation metric", "name": found[2], "part": f"validation batch {found[1]}"}
        elif found := re.fullmatch(r"avg_metrics\.(.+)", difference.name):
            changes = {"kind": "metric", "name": found[1], "part": "mean of a workload"}
        else:
            changes = {"name": f"{event['name']}: {difference.name}"}
        return dataclasses.replace(difference, **changes)

    def _difference(self, kind: str, name: str, batch: int | None, pair: list[Any]) -> Difference:
        return Difference(kind, name, batch, pair[0], pair[1], tolerance=self._tolerance.of(kind))
