"""The record of a training, and its file, which :mod:`det_lightning.testing.recorder` writes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from det_lightning.errors import DetLightningError
from det_lightning.testing.recorder import FORMAT, VERSION
from det_lightning.testing.records.values import number_in

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "trial": str,
    "settings": dict,
    "environment": dict,
    "events": list,
    "batches": int,
    "error": (dict, type(None)),
}
_EVENT_FIELDS = {
    "start": ("parameters", "weights", "random"),
    "batch_start": ("epoch", "data", "learning_rates", "random"),
    "batch_end": ("metrics", "gradients", "weights", "random"),
    "callback": ("name", "arguments"),
    "validation": ("metrics",),
    "end": ("weights", "learning_rates", "callbacks", "random"),
}


class RecordError(DetLightningError):
    """A record cannot be read or made; the message says which, why and what to do."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What a run depends on besides the trial: two records can be compared only where these are equal.

    Attributes:
        arguments: keyword arguments of the trial's constructor, beyond the context.
    """

    hparams: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the hyperparameters, without ranges
    config: dict[str, Any] | None = None  # the experiment configuration, or None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batches: int = 20  # number of batches to train
    seed: int = 0  # what Python's, numpy's and torch's random generators are seeded with before the trial is built
    validation_period: int = 10  # number of batches between validations; one at the end is always made
    reporting_period: int = 5  # number of batches of a training workload
    aggregation_frequency: int = 1  # number of batches whose gradients make one optimizer update


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """What was seen of one training.

    Attributes:
        trial: the trial's class, as ``"module:Class"``.
        settings: what the run was started with.
        environment: versions and machine: ``side`` (``"determined"`` or ``"det_lightning"``), ``determined`` or
            ``det_lightning`` (version), ``python``, ``torch``, ``numpy``, ``platform``, ``processor``, ``threads``,
            ``device``, and ``hooks`` (those that its callbacks have).
        events: what happened, in order of time; each has ``event`` and ``batch`` (number of batches trained before).
        batches: number of batches that were trained.
        error: None, or ``type``, ``message`` and ``traceback`` of what ended the training.
        path: the file that it was read from, if any.
    """

    trial: str
    settings: RunSettings
    environment: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]
    batches: int
    error: Mapping[str, str] | None = None
    path: Path | None = None

    def named(self, event: str) -> list[Mapping[str, Any]]:
        """Return the events of one kind: ``"start"``, ``"batch_start"``, ``"batch_end"``, ``"validation"``, ..."""
        return [entry for entry in self.events if entry["event"] == event]

    def training_metrics(self) -> dict[str, list[tuple[int, float]]]:
        """Return the curve of each scalar training metric: pairs of batch index and value."""
        return _curves(self.named("batch_end"))

    def validation_metrics(self) -> dict[str, list[tuple[int, float]]]:
        """Return the curve of each scalar validation metric: pairs of number of batches trained and value."""
        return _curves(self.named("validation"))

    def since(self, hook: str, batches: int | None = None) -> TrainingRecord:
        """Return the record from the first call of a callback's hook on, after so many batches if given."""
        calls = (event.get("name") == hook and batches in (None, event["batch"]) for event in self.events)
        first = next((index for index, found in enumerate(calls) if found), len(self.events))
        return dataclasses.replace(self, events=self.events[first + 1 :])

    def content(self) -> dict[str, Any]:
        """Return what the file of the record holds."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return {"format": FORMAT, "version": VERSION, **fields, "settings": vars(self.settings)}


def _curves(events: list[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for name, described in event["metrics"].items():
            if (value := number_in(described)) is not None:
                curves.setdefault(name, []).append((event["batch"], float(value)))
    return curves


def read_record(path: str | os.PathLike[str], trial: str | None = None) -> TrainingRecord:
    """Read a record.

    Args:
        path: the file that the recorder wrote.
        trial: the trial that it should be of, as ``"module:Class"``; only the class's name is compared, since modules
            move.

    Raises:
        RecordError: there is no such file, it is not a record, it is damaged, made by a newer recorder, or of another
            trial.
    """
    path = Path(path)
    advice = _how_to_make_one(trial)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"There is no {path}. {advice}") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not a record of a training, or is damaged: {error}. {advice}") from None
    record = dataclasses.replace(parse_record(content, str(path)), path=path)
    if trial is not None and record.trial.rpartition(":")[2] != trial.rpartition(":")[2]:
        raise RecordError(f"{path} is a record of {record.trial}; expected one of {trial}. {advice}")
    return record


def _how_to_make_one(trial: str | None) -> str:
    return (
        f"Make one where the trial trained until now, with a copy of recorder.py: "
        f"python recorder.py {trial or 'model_def:MyTrial'} --config const.yaml --output ref.json"
    )


def write_record(record: TrainingRecord, path: str | os.PathLike[str]) -> None:
    """Write a record for :func:`read_record` to read; raise OSError if the file cannot be written."""
    Path(path).write_text(json.dumps(record.content(), separators=(",", ":")))


def parse_record(content: Any, source: str) -> TrainingRecord:
    """Check that ``content``, which was read from JSON, has the form of a record, and return it as one.

    Raises:
        RecordError: it does not; all that is wrong is named, and ``source`` as where it is from.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecordError(f"{source} is JSON, but not a record of a training. {_how_to_make_one(None)}")
    if content.get("version") != VERSION:
        raise RecordError(
            f"{source} has version {content.get('version')!r} of the form of records; this det_lightning reads "
            f"{VERSION}. Make it again with the recorder that comes with this det_lightning."
        )
    wrong = list(_wrong_fields(content))
    if wrong:
        raise RecordError(f"{source} is damaged: {'; '.join(wrong[:5])}. {_how_to_make_one(content.get('trial'))}")
    fields = {name: content[name] for name in _FIELDS}
    fields.update(settings=RunSettings(**content["settings"]), events=tuple(content["events"]))
    return TrainingRecord(**fields)


def _wrong_fields(content: dict[str, Any]) -> Iterator[str]:
    for name, kind in _FIELDS.items():
        if not isinstance(content.get(name, Ellipsis), kind):
            yield f"{name} is {'missing' if name not in content else f'a {type(content[name]).__name__}'}"
    settings = content.get("settings")
    known = {field.name for field in dataclasses.fields(RunSettings)}
    if isinstance(settings, dict) and known != settings.keys():
        yield f"its settings are {', '.join(sorted(settings)) or 'empty'} rather than {', '.join(sorted(known))}"
    for number, event in enumerate(content["events"] if isinstance(content.get("events"), list) else []):
        if not isinstance(event, dict) or event.get("event") not in _EVENT_FIELDS or "batch" not in event:
            yield f"event {number} is of no known kind"
        elif missing := [name for name in _EVENT_FIELDS[event["event"]] if name not in event]:
            yield f"event {number} ({event['event']}) has no {', '.join(missing)}"
