"""What only Determined's master knew about checkpoints, read from outputs of the ``det`` command line."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
from pydantic.alias_generators import to_camel

from det_lightning.checkpoint.format.layout import MASTER_KEY
from det_lightning.files.strict_json import as_number, is_shallow
from det_lightning.masking import mask_config, short_text


class _Printed(pydantic.BaseModel):
    """JSON that the command line printed; keys that are not used may be missing or hold anything."""

    model_config = pydantic.ConfigDict(alias_generator=to_camel, strict=True)


def _find(*path: str) -> Any:
    """Return an optional field of a value within the printed values."""
    return pydantic.Field(None, validation_alias=pydantic.AliasPath(*path))


def _require(*path: str) -> Any:
    return pydantic.Field(validation_alias=pydantic.AliasPath(*path))


class _Validation(_Printed):
    total_batches: int
    metrics: dict[str, Any] | None = _find("metrics", "avgMetrics")


class _CheckpointWorkload(_Printed):
    total_batches: int
    uuid: str | None = None
    state: str | None = None
    end_time: str | None = None


class _Workload(_Printed):
    checkpoint: _CheckpointWorkload | None = None
    validation: _Validation | None = None


class _Trial(_Printed):  # of `det trial describe ID --json`
    id: int = _require("trial", "id")
    experiment_id: int = _require("trial", "experimentId")
    state: str | None = _find("trial", "state")
    hparams: dict[str, Any] | None = _find("trial", "hparams")
    workloads: list[_Workload] = []


class _Experiment(_Printed):  # an element of `det experiment describe ID,... --json`
    id: int = _require("experiment", "id")
    name: str | None = _find("experiment", "name")
    state: str | None = _find("experiment", "state")
    start_time: str | None = _find("experiment", "startTime")
    config: dict[str, Any] | None = None
    known_config: dict[str, Any] | None = _find("experiment", "config")


class _Checkpoint(_Printed):
    uuid: str
    trial_id: int = _require("training", "trialId")
    experiment_id: int = _require("training", "experimentId")
    config: dict[str, Any] | None = _find("training", "experimentConfig")
    hparams: dict[str, Any] | None = _find("training", "hparams")
    metrics: dict[str, Any] | None = _find("training", "validationMetrics", "avgMetrics")
    searcher_metric: float | int | str | None = _find("training", "searcherMetric")
    steps_completed: Any = _find("metadata", "steps_completed")
    state: str | None = None
    report_time: str | None = None


class _CheckpointList(_Printed):  # of the master's `/api/v1/experiments/ID/checkpoints`
    checkpoints: list[_Checkpoint]


# What an object is, by a key that only it has.
_KINDS: dict[str, type[_Printed]] = {
    "experiment": _Experiment,
    "trial": _Trial,
    "checkpoints": _CheckpointList,
    "uuid": _Checkpoint,
}


@dataclasses.dataclass(frozen=True)
class ExportedCheckpoint:
    """The facts about a checkpoint in the files; fields that they do not mention are None."""

    checkpoint_id: str
    file: str  # the first that names it
    trial_id: int
    experiment_id: int
    steps_completed: int | None = None
    is_deleted: bool = False
    time_s: float | None = None  # when it was reported, in seconds since 1970
    metrics: dict[str, Any] | None = None  # of the validation at the same batch
    searcher_metric: float | None = None


class MasterExport:
    """The facts in ``files``: outputs of the command line, by name, as bytes.

    Raise a ``ValueError`` that lists all mistakes, with file, key and value, if a file is no such output, or two files
    contradict each other.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.checkpoints: dict[str, ExportedCheckpoint] = {}
        self._experiments: dict[int, dict[str, Any]] = {}
        self._trials: dict[int, dict[str, Any]] = {}
        self._mistakes: list[str] = []
        for name, content in files.items():
            for printed in _read_output(name, content, self._mistakes):
                self._add(name, printed)
        if self._mistakes:
            raise ValueError("; ".join(self._mistakes))

    def find_metric(self, checkpoint: ExportedCheckpoint) -> dict[str, Any] | None:
        """Return name, value and direction of a checkpoint's searcher metric; None if unknown."""
        searcher = (self._experiments.get(checkpoint.experiment_id, {}).get("config") or {}).get("searcher")
        if not isinstance(searcher, dict) or not isinstance(name := searcher.get("metric"), str):
            return None
        value = as_number((checkpoint.metrics or {}).get(name))
        value = checkpoint.searcher_metric if value is None else value
        smaller_is_better = searcher.get("smaller_is_better") is not False
        return None if value is None else {"name": name, "value": value, "smaller_is_better": smaller_is_better}

    def make_entries(self, checkpoint: ExportedCheckpoint) -> dict[str, Any]:
        """Return the entries to add to the ``metadata.json`` of a checkpoint, without secrets."""
        experiment = self._experiments.get(checkpoint.experiment_id, {})
        trial = self._trials.get(checkpoint.trial_id, {})
        entries = {
            "trial": str(checkpoint.trial_id),
            "experiment": str(checkpoint.experiment_id),
            "metric": self.find_metric(checkpoint),
            "hparams": trial.get("hparams"),
            MASTER_KEY: {
                "experiment": {key: experiment.get(key) for key in ("name", "state", "start_time")},
                "trial": {"state": trial.get("state")},
                "validation_metrics": checkpoint.metrics,
            },
        }
        return {key: value for key, value in entries.items() if value is not None}

    def find_config(self, checkpoint: ExportedCheckpoint) -> dict[str, Any] | None:
        """Return the configuration of a checkpoint's experiment, with secrets masked; None if unknown."""
        masked: dict[str, Any] | None = mask_config(self._experiments.get(checkpoint.experiment_id, {}).get("config"))
        return masked

    def experiments_without_metric(self) -> list[int]:
        """Return the ids of the experiments without a configuration in any file, whose searcher metric is unknown."""
        ids = {checkpoint.experiment_id for checkpoint in self.checkpoints.values()}
        return sorted(one for one in ids if not self._experiments.get(one, {}).get("config"))

    def experiments_without_checkpoints(self) -> list[int]:
        """Return the ids of described experiments without any checkpoint in the files."""
        ids = {checkpoint.experiment_id for checkpoint in self.checkpoints.values()}
        return sorted(self._experiments.keys() - ids)

    def _add(self, file: str, printed: _Printed) -> None:
        if isinstance(printed, _Experiment):
            config = printed.config or printed.known_config
            _merge(self._experiments, printed.id, printed.model_dump() | {"config": config})
        elif isinstance(printed, _Trial):
            _merge(self._trials, printed.id, printed.model_dump(include={"state", "hparams"}))
            for checkpoint in _list_checkpoints(file, printed):
                self._add_checkpoint(checkpoint)
        elif isinstance(printed, _Checkpoint):
            _merge(self._experiments, printed.experiment_id, {"config": printed.config})
            _merge(self._trials, printed.trial_id, {"hparams": printed.hparams})
            steps = printed.steps_completed
            self._add_checkpoint(
                ExportedCheckpoint(
                    checkpoint_id=printed.uuid,
                    file=file,
                    trial_id=printed.trial_id,
                    experiment_id=printed.experiment_id,
                    steps_completed=steps if type(steps) is int else None,
                    is_deleted=_is_deleted(printed.state),
                    time_s=_parse_time(printed.report_time),
                    metrics=printed.metrics,
                    searcher_metric=as_number(printed.searcher_metric),
                )
            )

    def _add_checkpoint(self, found: ExportedCheckpoint) -> None:
        known = self.checkpoints.setdefault(found.checkpoint_id, found)
        for field in ("experiment_id", "trial_id", "steps_completed"):
            one = getattr(known, field)
            other = getattr(found, field)
            if None not in (one, other) and one != other:
                self._mistakes.append(
                    f"{found.file}: {field} of checkpoint {found.checkpoint_id!r:.80} is {other}, but {known.file} "
                    f"says {one}"
                )
        unknown = [field.name for field in dataclasses.fields(known) if getattr(known, field.name) is None]
        self.checkpoints[found.checkpoint_id] = dataclasses.replace(
            known, **{name: getattr(found, name) for name in unknown}
        )


def _merge(known: dict[int, dict[str, Any]], number: int, described: dict[str, Any]) -> None:
    """Add the description of an experiment or a trial to the known facts."""
    known.setdefault(number, {}).update({key: value for key, value in described.items() if value is not None})


def _list_checkpoints(file: str, printed: _Trial) -> Iterator[ExportedCheckpoint]:
    validations = {one.validation.total_batches: one.validation for one in printed.workloads if one.validation}
    for checkpoint in (one.checkpoint for one in printed.workloads):
        if checkpoint is None or checkpoint.uuid is None:
            continue
        validation = validations.get(checkpoint.total_batches)
        yield ExportedCheckpoint(
            checkpoint_id=checkpoint.uuid,
            file=file,
            trial_id=printed.id,
            experiment_id=printed.experiment_id,
            steps_completed=checkpoint.total_batches,
            is_deleted=_is_deleted(checkpoint.state),
            time_s=_parse_time(checkpoint.end_time),
            metrics=None if validation is None else validation.metrics,
        )


def _is_deleted(state: str | None) -> bool:
    return state is not None and state.removeprefix("STATE_") == "DELETED"


def _parse_time(text: str | None) -> float | None:
    """Return the time of an RFC 3339 text, in seconds since 1970."""
    if text is None:
        return None
    # Python 3.10 reads neither a Z nor nanoseconds.
    seconds, _, rest = text.removesuffix("Z").partition(".")
    try:
        moment = datetime.datetime.fromisoformat(f"{seconds}.{rest[:6]:0<6}" if rest else seconds)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)).timestamp()


def _read_output(file: str, content: bytes, mistakes: list[str]) -> Iterator[_Printed]:
    """Yield the objects in a file; add a sentence for each mistake, with file, key and value, to ``mistakes``."""
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
        kinds = [kind for key, kind in _KINDS.items() if isinstance(element, dict) and key in element]
        if not kinds:
            mistakes.append(
                f"{at} is neither an experiment, nor a trial, nor a list of checkpoints as Determined prints them; "
                f"got {short_text(mask_config(element))}"
            )
            continue
        try:
            printed = kinds[0].model_validate(element)
            yield from printed.checkpoints if isinstance(printed, _CheckpointList) else [printed]
        except pydantic.ValidationError as e:
            mistakes += [f"{at}: {_describe_error(error)}" for error in e.errors()]


def _describe_error(error: Any) -> str:
    location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    got = "" if error["type"] == "missing" else f"; got {short_text(error['input'])}"
    message = error["msg"].partition(" or instance of ")[0]
    return f"{location}: {message}{got}"
