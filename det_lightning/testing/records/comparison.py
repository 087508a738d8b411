"""The first difference of two records of the same trial, and by how much."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from det_lightning.masking import mask
from det_lightning.testing.records.described import (
    dtype_of,
    farthest_apart,
    is_array,
    is_plain,
    largest_element,
    summary_of,
)
from det_lightning.testing.records.difference import BIT_EQUAL, Difference, Tolerance
from det_lightning.testing.records.numbers import distance, ulps_between
from det_lightning.testing.records.record import RunSettings, TrainingRecord, number_in

__all__ = ["BIT_EQUAL", "Difference", "Tolerance", "first_difference", "tolerance_for"]

#: What numbers may depend on without any fault of the trial.
_ENVIRONMENT = ("torch", "device", "processor", "threads")
# Below this share of a model's largest gradient there is nothing but the rounding of float32.
_NOISE = 1e-5


def tolerance_for(reference: TrainingRecord, ours: TrainingRecord) -> Tolerance:
    """Return what may differ between records of these two environments.

    Nothing where torch's version, the device, the processor and the number of threads are the same. Otherwise other
    kernels sum in another order: 0.1 % relative, and 1e-5 absolute.
    """
    other = [name for name in _ENVIRONMENT if reference.environment.get(name) != ours.environment.get(name)]
    if not other:
        return BIT_EQUAL
    values = (f"{name} {reference.environment.get(name)} and {ours.environment.get(name)}" for name in other)
    return Tolerance(relative=1e-3, absolute=1e-5, reason="; ".join(values))


def first_difference(
    reference: TrainingRecord, ours: TrainingRecord, tolerance: Tolerance | None = None
) -> Difference | None:
    """Return the earliest difference of two records, or None where there is none.

    Args:
        reference: what should have happened.
        ours: what did.
        tolerance: by default that of :func:`tolerance_for`.
    """
    tolerance = tolerance or tolerance_for(reference, ours)
    comparison = _Comparison(reference, ours, tolerance)
    differences = comparison.differences()
    first = next(differences, None)
    if first is None:
        return None
    unsteady, drawn_apart = tuple(sorted(comparison.unsteady)), comparison.drawn_apart
    same_batch = itertools.takewhile(lambda difference: difference.batch == first.batch, differences)
    others = [other for other in same_batch if (other.kind, other.name) != (first.kind, first.name)]
    return dataclasses.replace(first, also=_by_kind(others), unsteady=unsteady, drawn_apart=drawn_apart)


def _by_kind(differences: list[Difference]) -> tuple[str, ...]:
    """Name the first of each kind, and how many more there are."""
    names: dict[str, dict[str, None]] = {}
    for difference in differences:
        names.setdefault(difference.kind, {})[difference.name] = None
    return tuple(
        f"{kind} {next(iter(found))}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")
        for kind, found in names.items()
    )


class _Comparison:
    """Walks through two records in step.

    Args:
        reference: what should have happened.
        ours: what did.
        tolerance: what may differ.

    Attributes:
        unsteady: parameters whose gradient has been nothing but rounding noise so far.
        drawn_apart: the batch from which on random states differ, where they are not compared.
    """

    def __init__(self, reference: TrainingRecord, ours: TrainingRecord, tolerance: Tolerance) -> None:
        self._reference = reference
        self._ours = ours
        self._tolerance = tolerance
        starts = [*reference.named("start"), *ours.named("start")]
        self._parameters = {name for start in starts for name in start["parameters"]}
        self.unsteady: set[str] = set()
        self.drawn_apart: int | None = None
        self._largest_weight = 0.0

    def differences(self) -> Iterator[Difference]:
        """Yield all differences in order of time, up to where the two take different ways."""
        for field in dataclasses.fields(RunSettings):
            asked = [getattr(record.settings, field.name) for record in (self._reference, self._ours)]
            if asked[0] != asked[1]:
                yield self._difference("settings", field.name, None, *mask(asked))
        for theirs, mine in itertools.zip_longest(*map(self._comparable_events, (self._reference, self._ours))):
            if theirs is None or mine is None or _label(theirs) != _label(mine):
                yield from self._parting(theirs, mine)
                return
            yield from self._of_events(theirs, mine)
        yield from self._ends()

    def _comparable_events(self, record: TrainingRecord) -> list[Mapping[str, Any]]:
        """Leave out hooks that the Determined of the other side does not have."""
        hooks = set(self._reference.environment.get("hooks", ())) & set(self._ours.environment.get("hooks", ()))
        return [event for event in record.events if event["event"] != "callback" or event["name"] in hooks]

    def _parting(self, theirs: Mapping[str, Any] | None, mine: Mapping[str, Any] | None) -> Iterator[Difference]:
        batch = min(event["batch"] for event in (theirs, mine) if event is not None)
        ends = list(self._ends(batch))
        yield from ends
        if not ends:
            labels = [None if event is None else _label(event) for event in (theirs, mine)]
            yield self._difference("callback", labels[0] or str(labels[1]), batch, *labels)

    def _ends(self, batch: int | None = None) -> Iterator[Difference]:
        errors = [record.error or {} for record in (self._reference, self._ours)]
        if errors[0].get("type") != errors[1].get("type"):
            shown = [f"{error['type']}: {error['message']}" if error else None for error in errors]
            name = next(error["type"] for error in errors if error)
            yield self._difference("error", name, min(self._lengths()) if batch is None else batch, *shown)
        elif self._lengths()[0] != self._lengths()[1]:
            yield self._difference("number of batches", "trained", min(self._lengths()), *self._lengths())

    def _lengths(self) -> tuple[int, int]:
        return self._reference.batches, self._ours.batches

    def _of_events(self, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[Difference]:
        if not self._tolerance.exact:
            self._excuse(theirs, mine)
        for field in _ORDER:
            if field in theirs:
                for difference in self._of_values(_KINDS[field], _TITLES.get(field, ""), theirs[field], mine[field]):
                    if not self._is_noise(difference := self._specified(difference, theirs)):
                        yield dataclasses.replace(difference, batch=theirs["batch"])

    def _excuse(self, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
        """Take down what is not compared, and explains later differences."""
        self.unsteady |= _with_noise_for_gradient(theirs.get("gradients", {}), mine.get("gradients", {}))
        if self.drawn_apart is None and theirs.get("random") != mine.get("random"):
            self.drawn_apart = theirs["batch"]
        weights = theirs.get("weights", {})
        self._largest_weight = largest_element(weights[name] for name in self._parameters & weights.keys())

    def _is_noise(self, difference: Difference) -> bool:
        if difference.kind == "buffer":  # statistics of layers follow the parameters before them
            return bool(self.unsteady)
        return difference.kind == "parameter" and difference.name in self.unsteady

    def _specified(self, difference: Difference, event: Mapping[str, Any]) -> Difference:
        """Name what the field of an event alone does not tell."""
        if event["event"] == "validation":
            return dataclasses.replace(difference, kind="validation metric")
        if event["event"] == "callback":
            return _of_callback(difference, event["name"])
        if difference.kind == "parameter" and difference.name not in self._parameters:
            return dataclasses.replace(difference, kind="buffer")
        return difference

    def _of_values(self, kind: str, name: str, theirs: Any, mine: Any) -> Iterator[Difference]:
        if kind in ("random state", "gradient") and not self._tolerance.exact:
            return
        numbers = number_in(theirs), number_in(mine)
        if numbers[0] is not None and numbers[1] is not None:
            yield from self._of_numbers(kind, name, theirs, mine)
        elif is_array(theirs) and is_array(mine) and theirs["shape"] == mine["shape"]:
            yield from self._of_arrays(kind, name, theirs, mine)
        elif is_plain(theirs) and is_plain(mine):
            for key in dict.fromkeys([*theirs, *mine]):
                inner = f"{name}.{key}" if name else key
                yield from self._of_values(kind, inner, theirs.get(key), mine.get(key))
        elif isinstance(theirs, list) and isinstance(mine, list) and len(theirs) == len(mine):
            for index, (one, other) in enumerate(zip(theirs, mine, strict=True)):
                yield from self._of_values(kind, f"{name}[{index}]", one, other)
        elif theirs != mine:
            yield self._difference(kind, name, None, summary_of(theirs), summary_of(mine))

    def _of_numbers(self, kind: str, name: str, theirs: Any, mine: Any) -> Iterator[Difference]:
        one, other = number_in(theirs), number_in(mine)
        assert one is not None
        assert other is not None
        if not self._tolerance.of(kind).allows(one, other):
            yield self._distant(kind, name, one, other, dtype_of(theirs))
        elif self._tolerance.exact and dtype_of(theirs) != dtype_of(mine):
            yield self._difference(kind, name, None, summary_of(theirs), summary_of(mine))

    def _of_arrays(self, kind: str, name: str, theirs: Any, mine: Any) -> Iterator[Difference]:
        if theirs["digest"] == mine["digest"] and theirs["dtype"] == mine["dtype"]:
            return
        as_weights = kind == "parameter" and not self._tolerance.exact
        scale = max(self._largest_weight if as_weights else 0.0, largest_element((theirs, mine)))
        found = farthest_apart(theirs, mine, self._tolerance.of(kind), scale, as_weights=as_weights)
        if found is not None:
            part, one, other = found
            yield dataclasses.replace(self._distant(kind, name, one, other, theirs["dtype"]), part=part)
        elif self._tolerance.exact:
            yield self._difference(kind, name, None, summary_of(theirs), summary_of(mine))

    def _distant(self, kind: str, name: str, one: float, other: float, dtype: str) -> Difference:
        apart = distance(one, other)
        largest = max(abs(one), abs(other))
        return dataclasses.replace(
            self._difference(kind, name, None, one, other),
            absolute=apart,
            relative=apart / largest if largest else None,
            ulps=ulps_between(one, other, dtype),
        )

    def _difference(self, kind: str, name: str, batch: int | None, theirs: Any, mine: Any) -> Difference:
        return Difference(kind, name, batch, theirs, mine, tolerance=self._tolerance.of(kind))


# The fields of events in the order in which what they tell came to be.
_KINDS = {
    "epoch": "epoch",
    "data": "data",
    "learning_rates": "learning rate",
    "metrics": "metric",
    "gradients": "gradient",
    "parameters": "parameter",
    "weights": "parameter",
    "arguments": "callback",
    "callbacks": "callback state",
    "random": "random state",
}
_ORDER = tuple(_KINDS)
_TITLES = {"epoch": "index", "data": "batch", "learning_rates": "group"}


def _of_callback(difference: Difference, hook: str) -> Difference:
    """Call the metrics that a hook was given by their names."""
    if found := re.fullmatch(r"outputs\[(\d+)\]\.(.+)", difference.name):
        batch, name = found.groups()
        return dataclasses.replace(difference, kind="validation metric", name=name, part=f"validation batch {batch}")
    if found := re.fullmatch(r"avg_metrics\.(.+)", difference.name):
        return dataclasses.replace(difference, kind="metric", name=found[1], part="mean of a workload")
    return dataclasses.replace(difference, name=f"{hook}: {difference.name}")


def _with_noise_for_gradient(theirs: Mapping[str, float], mine: Mapping[str, float]) -> set[str]:
    """Return the parameters whose gradient is zero but for rounding, as that of a bias before a batch norm is.

    Optimizers that divide by a gradient's size make steps of full length of it, in any direction.
    """
    found = set()
    largest = [max(gradients.values(), default=0.0) for gradients in (theirs, mine)]
    for name in theirs.keys() & mine.keys():
        sizes = theirs[name], mine[name]
        if any(sizes) and any(size < _NOISE * most for size, most in zip(sizes, largest, strict=True)):
            found.add(name)
    return found


def _label(event: Mapping[str, Any]) -> str:
    return str(event.get("name", event["event"]))
