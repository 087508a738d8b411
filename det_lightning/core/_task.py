"""What the runner of an experiment passes to the processes of a trial, and what they report back, as plain files."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from det_lightning.escaping import escape
from det_lightning.files.local_files import write_private
from det_lightning.files.plain_values import Losses, as_plain
from det_lightning.files.strict_json import as_number, to_json

logger = logging.getLogger(__name__)

#: The environment variable that names the file of the task.
TASK_VARIABLE = "DET_LIGHTNING_TASK"
#: The environment variable of ``det-lightning run --try``, and how many batches its trial trains.
TRY_VARIABLE = "DET_LIGHTNING_TRY"
TRY_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class TrialTask:
    """One run of one trial of an experiment."""

    directory: Path  # the trial's directory, for its reports
    experiment_id: int  # from 1
    trial_id: int  # in the experiment, from 1
    run_id: int  # how often the trial was started, from 1
    trial_seed: int  # for the random generators of the trial
    hparams: dict[str, Any]  # the values that the search drew
    config: dict[str, Any]  # the experiment configuration with all defaults
    slots: list[int]  # indices of the devices, or of processes on the CPU
    checkpoint_storage: str | dict[str, Any]  # a directory, or a section of a configuration
    latest_checkpoint: str | None = None  # where the run starts: the trial's newest checkpoint, or that of a warm start
    steps_completed: int = 0  # number of batches that the trial's newest checkpoint has been trained for
    validate_at: list[int] = dataclasses.field(default_factory=list)  # lengths, in units of the search
    best_validation: float | None = None  # the experiment's best value of the searcher's metric when the run began
    gpu_uuids: list[str] = dataclasses.field(default_factory=list)  # identifiers of the devices; empty on the CPU
    loggers: list[str] = dataclasses.field(default_factory=list)  # names of Lightning's loggers for this run
    recorded: list[str] = dataclasses.field(default_factory=list)  # SHA-256 of files of its newest checkpoint
    trusted: bool = False  # whether it may resume from a checkpoint that holds objects, whoever wrote that

    @property
    def file(self) -> Path:
        """The file that the task is written to."""
        return self.directory / "task.json"

    @property
    def metrics_file(self) -> Path:
        """The file that the trial writes its metrics to."""
        return self.directory / "metrics.jsonl"

    @property
    def tensorboard_path(self) -> Path:
        """The directory of the trial's TensorBoard files, unless its code names another one."""
        return self.directory / "tensorboard"

    @property
    def best_file(self) -> Path:
        """The file that the runner writes each trial's best value of the searcher's metric to."""
        return self.directory.with_name("best.json")

    def best_of_others(self) -> float | None:
        """Return the best value of the searcher's metric in the other trials so far; None if there is none."""
        return self.best_of_experiment(leave_out=self.trial_id)

    def best_of_experiment(self, leave_out: int | None = None) -> float | None:
        """Return the best value of the searcher's metric in all trials so far, but one; None if there is none.

        If the runner's file does not exist, as on a machine without the experiment's directory, it is the experiment's
        best value from when the run began.
        """
        try:
            best = json.loads(self.best_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return as_number(self.best_validation)
        found = {int(trial_id): as_number(value) for trial_id, value in best.items()}
        values = [value for trial_id, value in found.items() if value is not None and trial_id != leave_out]
        choose = min if self.config["searcher"]["smaller_is_better"] else max
        return choose(values, default=None)

    def write(self) -> None:
        """Write the task to :attr:`file`, where the processes of the trial look for it."""
        content = {**dataclasses.asdict(self), "directory": str(self.directory)}
        write_private(self.file, to_json(content))

    @classmethod
    def read(cls, file: Path) -> TrialTask:
        """Read what :meth:`write` wrote; raises an OSError if the file cannot be read."""
        content = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**content, "directory": Path(content["directory"])})

    def report(self, group: str, steps_completed: float | None, metrics: dict[str, Any]) -> None:
        """Append a record to the metrics of the trial, synced to disk.

        ``group`` is ``"training"``, ``"validation"``, or another name. Values that JSON cannot hold are left out, and a
        warning names them once.
        """
        record = {
            "group": group,
            "run": self.run_id,
            "steps_completed": steps_completed,
            "metrics": _as_reported(metrics, f"{group} metrics"),
            "time": time.time(),
        }
        with self.metrics_file.open("a+b") as file:
            # After a full disk, or a crash of the machine, the last line may lack its end.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            begin = b"" if file.read() in (b"", b"\n") else b"\n"
            # A single write, so that a reader sees a whole line or none.
            file.write(begin + to_json(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read_reports(self) -> Iterator[dict[str, Any]]:
        """Yield the records of this run so far; lines that were cut off, as by a full disk, are left out."""
        if not self.metrics_file.exists():
            return
        with self.metrics_file.open("rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and record.get("run") == self.run_id:
                    yield record


def current_task() -> TrialTask | None:
    """Return the task of this process; None if no experiment started it. Errors are those of :meth:`TrialTask.read`."""
    file = os.environ.get(TASK_VARIABLE)
    return TrialTask.read(Path(file)) if file else None


def _as_reported(metrics: dict[str, Any], where: str) -> Any:
    losses = Losses()
    plain = as_plain(metrics, where, losses)
    for note in losses.notes:
        _warn_once(note)
    return plain


@functools.cache
def _warn_once(note: str) -> None:
    logger.warning("Not everything is reported to the experiment: %s.", escape(note))
