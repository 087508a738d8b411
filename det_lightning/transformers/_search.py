"""Compares the ``searcher`` section of a configuration with a ``transformers.Trainer``: length and metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def require_length(searcher: Mapping[str, Any], unit: str, length: float, argument: str) -> None:
    """Raise a ValueError if the section ``searcher`` has another length than the trainer, or a length without a unit.

    The trainer's ``argument`` has the ``length`` in the ``unit`` ``"batches"`` or ``"epochs"``.
    """
    trained = f"{argument} {length:g} makes the trainer train {length:g} {unit}"
    max_length = searcher.get("max_length")
    if isinstance(max_length, Mapping):
        if dict(max_length) != {unit: length}:
            raise ValueError(
                f"searcher.max_length is {dict(max_length)}, and {trained}. Remove searcher.max_length, which is "
                "deprecated, or set the same length in both."
            )
    elif max_length is not None:
        raise ValueError(
            f"searcher.max_length is {max_length}, without a unit, and {trained}. Remove searcher.max_length, which "
            f"is deprecated: {argument} says how long the trainer trains."
        )
    elif (clock := searcher.get("time_metric")) in ("batches", "epochs"):
        max_time = searcher.get("max_time")
        if (clock, max_time) != (unit, length):
            raise ValueError(
                f"searcher.max_time is {max_time} with searcher.time_metric: {clock}, and {trained}. Let "
                f"searcher.max_time or {argument} follow the other one, in the same unit."
            )


def require_metrics(reported: Collection[str], needed: Mapping[str, str | None]) -> None:
    """Raise a ValueError that names all ``needed`` metrics missing from the ``reported`` metrics of an evaluation.

    ``needed`` has the name of a metric, or None, by the field of the configuration.
    """
    missing = [f"{field}: {name}" for field, name in needed.items() if name is not None and name not in reported]
    if missing:
        raise ValueError(
            f"The evaluation lacks metrics of the configuration: {', '.join(missing)}. The evaluation has "
            f"{', '.join(sorted(reported))}. Return the metrics from compute_metrics (the Trainer prefixes eval_), or "
            "change the configuration: searches, retention and the choice of the best checkpoint need the metrics."
        )
