"""The JSON that Determined's command line prints about experiments, trials and checkpoints, as typed objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pydantic
from pydantic.alias_generators import to_camel

from det_lightning.checkpoint.format.layout import is_shallow
from det_lightning.masking import mask


class Printed(pydantic.BaseModel):
    """An object that the command line prints; keys that are not used here may be missing or hold anything."""

    model_config = pydantic.ConfigDict(alias_generator=to_camel, strict=True)


class Metrics(Printed):
    """The metrics of a workload."""

    avg_metrics: dict[str, Any] | None = None


class Validation(Printed):
    """A validation of a trial."""

    total_batches: int
    metrics: Metrics | None = None


class CheckpointWorkload(Printed):
    """A checkpoint of a trial."""

    total_batches: int
    uuid: str | None = None
    state: str | None = None
    end_time: str | None = None


class Workload(Printed):
    """One of a trial's workloads: training, a validation or a checkpoint."""

    checkpoint: CheckpointWorkload | None = None
    validation: Validation | None = None


class Trial(Printed):
    """A trial."""

    id: int
    experiment_id: int
    state: str | None = None
    hparams: dict[str, Any] | None = None


class TrialDescription(Printed):
    """``det trial describe ID --json``."""

    trial: Trial
    workloads: list[Workload] = []


class Experiment(Printed):
    """An experiment."""

    id: int
    name: str | None = None
    state: str | None = None
    start_time: str | None = None
    config: dict[str, Any] | None = None


class ExperimentDescription(Printed):
    """An element of ``det experiment describe ID,... --json``."""

    experiment: Experiment
    config: dict[str, Any] | None = None


class Training(Printed):
    """The trial that wrote a checkpoint."""

    trial_id: int
    experiment_id: int
    experiment_config: dict[str, Any] | None = None
    hparams: dict[str, Any] | None = None
    validation_metrics: Metrics | None = None
    searcher_metric: float | int | str | None = None


class Checkpoint(Printed):
    """A checkpoint in a list."""

    uuid: str
    training: Training
    state: str | None = None
    report_time: str | None = None
    metadata: dict[str, Any] = {}


class CheckpointList(Printed):
    """The checkpoints of an experiment, as the master's ``/api/v1/experiments/ID/checkpoints`` lists them."""

    checkpoints: list[Checkpoint]


def read_output(file: str, content: bytes, mistakes: list[str]) -> Iterator[Printed]:
    """Yield the objects in a file; add what is wrong with it to ``mistakes``, with file, key and value."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as e:
        mistakes.append(f"{file} is not JSON: {e}")
        return
    if not is_shallow(parsed):
        mistakes.append(f"{file} is nested too deeply for an output of Determined")
        return
    for index, element in enumerate(parsed) if isinstance(parsed, list) else [(None, parsed)]:
        at = file if index is None else f"{file}: [{index}]"
        kind = _kind_of(element)
        if kind is None:
            mistakes.append(
                f"{at} is neither an experiment, nor a trial, nor a list of checkpoints as Determined prints them; "
                f"got {mask(element)!r:.80}"
            )
            continue
        try:
            printed = kind.model_validate(element)
            yield from printed.checkpoints if isinstance(printed, CheckpointList) else [printed]
        except pydantic.ValidationError as e:
            mistakes += [f"{at}: {_described(error)}" for error in e.errors()]


def _kind_of(element: Any) -> type[Printed] | None:
    if not isinstance(element, dict):
        return None
    kinds: dict[str, type[Printed]] = {
        "experiment": ExperimentDescription,
        "trial": TrialDescription,
        "checkpoints": CheckpointList,
        "uuid": Checkpoint,
    }
    return next((kind for key, kind in kinds.items() if key in element), None)


def _described(error: Any) -> str:
    location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    got = "" if error["type"] == "missing" else f"; got {mask(error['input'])!r:.80}"
    return f"{location}: {error['msg']}{got}"
