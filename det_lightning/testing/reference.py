"""Records of a training: reading one that was made elsewhere, and making one here, on either side.

A record is the JSON file that :mod:`det_lightning.testing.recorder` writes. The same recorder watches the real
determined (in a process of its own, or long ago in an old environment) and det_lightning (in this process), so that
both records have the same form. Compare them with :func:`det_lightning.testing.comparison.first_difference`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from det_lightning.errors import DetLightningError

__all__ = [
    "RecordError",
    "RunSettings",
    "TrainingRecord",
    "read_record",
    "record_determined",
    "record_ours",
    "write_record",
]

#: The newest form of records that can be read.
VERSION = 1
_FORMAT = "det-lightning training record"
_RECORDER = Path(__file__).with_name("recorder.py")

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
    """A record can not be read or made; the message says which, why and what to do."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What a run depends on besides the trial: two records can be compared only where these are equal.

    Attributes:
        hparams: the hyperparameters, without ranges.
        config: the experiment configuration, or None.
        batches: number of batches to train.
        seed: what Python's, numpy's and torch's random generators are seeded with before the trial is built.
        validation_period: number of batches between validations; one at the end is always made.
        reporting_period: number of batches of a training workload.
        aggregation_frequency: number of batches whose gradients make one optimizer update.
    """

    hparams: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    batches: int = 20
    seed: int = 0
    validation_period: int = 10
    reporting_period: int = 5
    aggregation_frequency: int = 1


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


def _curves(events: list[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for name, described in event["metrics"].items():
            if (value := number_in(described)) is not None:
                curves.setdefault(name, []).append((event["batch"], float(value)))
    return curves


def number_in(described: Any) -> int | float | None:
    """Return the number that a recorded value is, or None."""
    if isinstance(described, dict) and described.get("~") == "number":
        described = described["value"]
    return described if isinstance(described, int | float) and not isinstance(described, bool) else None


def read_record(path: str | os.PathLike[str], trial: str | None = None) -> TrainingRecord:
    """Read a record.

    Args:
        path: the file that the recorder wrote.
        trial: the trial that it should be of, as ``"module:Class"``; only the class's name is compared, since modules
            move.

    Raises:
        RecordError: there is no such file, it is no record, it is damaged, made by a newer recorder, or of another
            trial.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"There is no {path}. {_how_to_make_one(trial)}") from None
    except OSError as error:
        raise RecordError(f"{path} can not be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{path} is no record of a training, or is damaged: {error}. {_how_to_make_one(trial)}"
        ) from None
    record = dataclasses.replace(_parsed(content, str(path)), path=path)
    if trial is not None and _class_of(record.trial) != _class_of(trial):
        raise RecordError(f"{path} is a record of {record.trial}; expected one of {trial}. {_how_to_make_one(trial)}")
    return record


def _how_to_make_one(trial: str | None) -> str:
    return (
        f"Make one where the trial trained until now, with a copy of {_RECORDER.name}: "
        f"python recorder.py {trial or 'model_def:MyTrial'} --config const.yaml --output ref.json"
    )


def _class_of(spec: str) -> str:
    return spec.rpartition(":")[2]


def write_record(record: TrainingRecord, path: str | os.PathLike[str]) -> None:
    """Write a record, so that :func:`read_record` gives it back.

    Raises:
        OSError: the file can not be written.
    """
    content = dataclasses.asdict(dataclasses.replace(record, path=None))
    del content["path"]
    Path(path).write_text(json.dumps({"format": _FORMAT, "version": VERSION, **content}, separators=(",", ":")))


def _parsed(content: Any, source: str) -> TrainingRecord:
    """Check that ``content`` has the form of a record, and return it as one."""
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise RecordError(f"{source} is JSON, but no record of a training. {_how_to_make_one(None)}")
    if content.get("version") != VERSION:
        raise RecordError(
            f"{source} has version {content.get('version')!r} of the form of records; this det_lightning reads "
            f"{VERSION}. Make it again with the recorder that comes with this det_lightning."
        )
    wrong = list(_wrong_fields(content))
    if wrong:
        raise RecordError(f"{source} is damaged: {'; '.join(wrong[:5])}. {_how_to_make_one(content.get('trial'))}")
    settings = RunSettings(**content["settings"])
    fields = {name: content[name] for name in ("trial", "environment", "batches", "error")}
    return TrainingRecord(settings=settings, events=tuple(content["events"]), **fields)


def _wrong_fields(content: dict[str, Any]) -> Iterator[str]:
    for name, kind in _FIELDS.items():
        if not isinstance(content.get(name, Ellipsis), kind):
            yield f"{name} is {'missing' if name not in content else f'a {type(content[name]).__name__}'}"
    settings = content.get("settings")
    if isinstance(settings, dict):
        known = {field.name for field in dataclasses.fields(RunSettings)}
        if known != settings.keys():
            yield f"its settings are {', '.join(sorted(settings)) or 'empty'} rather than {', '.join(sorted(known))}"
    for number, event in enumerate(content["events"] if isinstance(content.get("events"), list) else []):
        if not isinstance(event, dict) or event.get("event") not in _EVENT_FIELDS or "batch" not in event:
            yield f"event {number} is of no known kind"
        elif missing := [name for name in _EVENT_FIELDS[event["event"]] if name not in event]:
            yield f"event {number} ({event['event']}) has no {', '.join(missing)}"


def record_ours(
    trial: type, settings: RunSettings, *, spec: str | None = None, threads: int | None = None
) -> TrainingRecord:
    """Train ``trial`` on det_lightning in this process, and return what was seen.

    An error of the trial ends up in the record. The random generators and torch's number of threads are put back.

    Args:
        trial: a ``PyTorchTrial`` class.
        settings: what to run, such as ``read_record(path).settings``.
        spec: the name to record, by default ``"module:Class"`` of the class.
        threads: torch's number of threads, by default as it is; numbers may depend on it, so give the reference's.
    """
    from det_lightning import pytorch
    from det_lightning.pytorch.random_state import isolated_rng
    from det_lightning.testing import recorder

    log = recorder.TrainingLog()
    spec = spec or f"{trial.__module__}:{trial.__qualname__}"
    with tempfile.TemporaryDirectory() as directory, isolated_rng(), _torch_threads(threads):
        code = Path(directory, "code")
        code.mkdir()
        fit = {"checkpoint_storage": Path(directory, "checkpoints"), "code_dir": code, "preemption": False}
        quiet = {"enable_progress_bar": False}
        asked = dataclasses.asdict(settings)
        training = functools.partial(recorder.train, trial, pytorch, asked, log, quiet, fit)
        made = recorder.make_record("det_lightning", spec, asked, log, training)
    # As a record that was read has it: no tuples, and names of metrics are strings.
    return _parsed(json.loads(json.dumps(made)), "What was just recorded")


@contextlib.contextmanager
def _torch_threads(number: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def record_determined(
    spec: str,
    settings: RunSettings,
    *,
    directory: str | os.PathLike[str] = ".",
    python: str | os.PathLike[str] = sys.executable,
    timeout_s: float = 600,
) -> TrainingRecord:
    """Train a trial on the real determined, in a process of its own, and return what was seen.

    A trial that imports ``det_lightning`` gets determined under that name there.

    Args:
        spec: the trial as ``"module:Class"``.
        settings: what to run.
        directory: where the module is imported from, and the working directory.
        python: the interpreter to run, by default the present one; it may be one of an old environment.
        timeout_s: give up after so many seconds.

    Raises:
        RecordError: determined is not installed there, the trial can not be imported, or the process failed or took
            too long. (An error while it trains is not raised; it is in the record.)
    """
    with tempfile.TemporaryDirectory() as temporary:
        asked, output = Path(temporary, "settings.json"), Path(temporary, "record.json")
        asked.write_text(json.dumps(dataclasses.asdict(settings)))
        command = [os.fspath(python), str(_RECORDER), spec, "--settings", str(asked), "--output", str(output)]
        try:
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            message = f"{spec} did not end on determined within {timeout_s:g} s. Train fewer batches."
            raise RecordError(message) from None
        if done.returncode != 0:
            said = done.stderr.strip()[-4000:] or f"it ended with status {done.returncode} and no message"
            raise RecordError(f"{spec} can not be recorded on determined: {said}")
        record = read_record(output, spec)
    return dataclasses.replace(record, path=None)
