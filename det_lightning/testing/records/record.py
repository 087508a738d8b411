"""Reads the file of a recorded training: settings, events and values."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning.errors import DetLightningError
from det_lightning.files.file_kinds import require_file
from det_lightning.testing.recorder import FORMAT, VERSION


class RecordError(DetLightningError):
    """A record cannot be read or made; the message names the record, the reason and what to do."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run; two records are comparable only if their settings are equal."""

    hparams: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # without ranges
    config: dict[str, Any] | None = None  # the experiment configuration, if there is one
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for the constructor, besides the context
    batches: int = 20  # number of batches to train
    seed: int = 0  # for the generators of Python, numpy and torch, set before the trial is built
    validation_period: int = 10  # in batches; there is always a validation at the end
    reporting_period: int = 5  # in batches
    aggregation_frequency: int = 1  # number of batches whose gradients make one update


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """One recorded training."""

    trial: str  # "module:Class"
    settings: RunSettings
    environment: Mapping[str, Any]  # as recorder.environment() returns it
    events: tuple[Mapping[str, Any], ...]  # in order; each has "event" and "batch" (number of batches trained before)
    batches: int  # number of batches trained
    error: Mapping[str, str] | None = None  # "type", "message" and "traceback" of an error that ended the training

    def select(self, event: str) -> list[Mapping[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]

    def curves(self, event: str) -> dict[str, list[tuple[int, float]]]:
        """Return the batches and values of each scalar metric; ``event`` is ``"batch_end"`` or ``"validation"``."""
        curves: dict[str, list[tuple[int, float]]] = {}
        for entry in self.select(event):
            for name, described in entry["metrics"].items():
                if (value := read_number(described)) is not None:
                    curves.setdefault(name, []).append((entry["batch"], float(value)))
        return curves

    def since(self, hook: str, batches: int | None = None) -> TrainingRecord:
        """Return the record from the first call of a hook on, or from the first call after ``batches`` batches."""
        calls = (event.get("name") == hook and batches in (None, event["batch"]) for event in self.events)
        first = next((index for index, found in enumerate(calls) if found), len(self.events))
        return dataclasses.replace(self, events=self.events[first + 1 :])

    def content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **vars(self), "settings": vars(self.settings)}


def read_record(path: str | os.PathLike[str], trial: str | None = None) -> TrainingRecord:
    """Read a record of ``trial``; modules may move, so only the name of the class is compared."""
    path = Path(path)
    advice = _advise_recording(trial)
    try:
        require_file(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"There is no file {path}. {advice}") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not a record of a training, or is damaged: {error}. {advice}") from None
    record = parse_record(content, str(path))
    if trial is not None and record.trial.rpartition(":")[2] != trial.rpartition(":")[2]:
        raise RecordError(f"{path} must be a record of {trial}; got a record of {record.trial}. {advice}")
    return record


def _advise_recording(trial: str | None) -> str:
    return (
        "Make a record where the trial has trained so far, with a copy of recorder.py: python recorder.py "
        f"{shlex.quote(trial or 'model_def:MyTrial')} --config const.yaml --output ref.json"
    )


def parse_record(content: Any, source: str) -> TrainingRecord:
    """Return the record in ``content``, read from JSON; a RecordError names ``source`` and each mistake."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecordError(f"{source} is JSON, but not a record of a training. {_advise_recording(None)}")
    if content.get("version") != VERSION:
        raise RecordError(
            f"{source} has version {content.get('version')!r} of the record format; this det_lightning reads "
            f"{VERSION}. Record again with the recorder of this det_lightning."
        )
    try:
        fields = {field.name: content[field.name] for field in dataclasses.fields(TrainingRecord)}
        fields.update(settings=RunSettings(**content["settings"]), events=tuple(content["events"]))
    except (KeyError, TypeError) as error:
        raise RecordError(f"{source} is damaged: {error!r}. {_advise_recording(content.get('trial'))}") from None
    return TrainingRecord(**fields)


# Values in the descriptions of the recorder


def get_kind(value: Any) -> str | None:
    """Return the kind of a described value: "array", "number", "object" or "dict"; None for a plain value."""
    return value.get("~", "dict") if isinstance(value, dict) else None


def read_number(described: Any) -> int | float | None:
    """Return a recorded number; None for other values."""
    if get_kind(described) == "number":
        described = described["value"]
    return described if isinstance(described, int | float) and not isinstance(described, bool) else None


def read_dtype(value: Any) -> str:
    """Return the dtype of a described value, or the name of the Python type."""
    return str(value["dtype"]) if isinstance(value, dict) else type(value).__name__


def summarize_value(value: Any) -> Any:
    """Return a recorded value in the form for messages."""
    kind = get_kind(value)
    if kind == "array":
        return f"{value['dtype']} {'x'.join(map(str, value['shape']))} with digest {value['digest']}"
    if kind == "number":
        return f"{value['dtype']} {value['value']!r}"
    if kind == "object":
        return f"a {value['class']}"
    return f"{len(value)} items" if isinstance(value, list | dict) else value


def shorten_repr(value: Any) -> str:
    """Return the representation of a value, cut to 80 characters."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def distance(one: float, other: float) -> float:
    """Return ``|one - other|``: 0 for two NaNs, infinity for a single NaN."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart
