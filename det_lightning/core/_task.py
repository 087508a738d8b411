"""What the runner of an experiment passes to the processes of a trial, and what they report back, as plain files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any

#: The variable of the environment that names the file of the task.
TASK_VARIABLE = "DET_LIGHTNING_TASK"


@dataclasses.dataclass(frozen=True)
class TrialTask:
    """One run of one trial of an experiment."""

    directory: Path  # the trial's, for what it reports
    experiment_id: int  # from 1
    trial_id: int  # in the experiment, from 1
    run_id: int  # how often the trial was started, from 1
    trial_seed: int  # for the random generators of the trial
    hparams: dict[str, Any]  # the values that the search has drawn
    config: dict[str, Any]  # the experiment configuration with all defaults
    slots: list[int]  # indices of the devices, or of processes on the CPU
    checkpoint_storage: str | dict[str, Any]  # a directory, or a section of a configuration
    latest_checkpoint: str | None = None  # where the run starts: the trial's newest checkpoint, or that of a warm start
    steps_completed: int = 0  # number of batches that the trial's newest checkpoint has been trained for
    validate_at: list[int] = dataclasses.field(default_factory=list)  # lengths, in units of the search
    best_validation: float | None = None  # of the searcher's metric in the experiment, when the run began
    gpu_uuids: list[str] = dataclasses.field(default_factory=list)  # identifiers of the devices; empty on the CPU
    loggers: list[str] = dataclasses.field(default_factory=list)  # names of Lightning's loggers for this run

    @property
    def file(self) -> Path:
        """Where it is kept."""
        return self.directory / "task.json"

    @property
    def metrics_file(self) -> Path:
        """Where the trial writes its metrics."""
        return self.directory / "metrics.jsonl"

    @property
    def tensorboard_path(self) -> Path:
        """Where the trial writes its TensorBoard files, unless its code names another directory."""
        return self.directory / "tensorboard"

    @property
    def best_file(self) -> Path:
        """Where the runner writes the best value of the searcher's metric in each trial of the experiment."""
        return self.directory.with_name("best.json")

    def best_of_others(self) -> float | None:
        """Return the best value of the searcher's metric in the other trials up to now; None if there is none."""
        return self._best(leave_out=self.trial_id)

    def best_of_experiment(self) -> float | None:
        """Return the best value of the searcher's metric in all trials up to now; None if there is none."""
        return self._best()

    def _best(self, leave_out: int | None = None) -> float | None:
        """Return the best value in the trials but one.

        Where the runner's file cannot be seen, as on a machine without the experiment's directory, it is the best value
        from when the run began.
        """
        try:
            best = json.loads(self.best_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return self.best_validation
        values = [value for trial_id, value in best.items() if int(trial_id) != leave_out]
        choose = min if self.config["searcher"]["smaller_is_better"] else max
        return choose(values, default=None)

    def write(self) -> None:
        """Write it where the processes of the trial look for it."""
        content = {**dataclasses.asdict(self), "directory": str(self.directory)}
        draft = self.file.with_suffix(".tmp")
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(self.file)

    @classmethod
    def read(cls, file: Path) -> TrialTask:
        """Read what :meth:`write` wrote.

        Raises:
            OSError: the file cannot be read.
        """
        content = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**content, "directory": Path(content["directory"])})

    def report(self, group: str, steps_completed: int | None, metrics: dict[str, Any]) -> None:
        """Add a record to the metrics of the trial, through to the disk; only one rank may.

        Args:
            group: ``"training"``, ``"validation"``, or another name.
            steps_completed: number of batches trained.
            metrics: what JSON knows; NaN and infinities become strings.
        """
        record = {
            "group": group,
            "run": self.run_id,
            "steps_completed": steps_completed,
            "metrics": as_json(metrics),
            "time": time.time(),
        }
        with self.metrics_file.open("ab") as file:
            # One write, so that a reader sees a whole line or none.
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def current_task() -> TrialTask | None:
    """Return the task of this process; None if no experiment has started it.

    Raises:
        OSError: the variable names a file that cannot be read.
    """
    file = os.environ.get(TASK_VARIABLE)
    return TrialTask.read(Path(file)) if file else None


def as_json(value: Any) -> Any:
    """Return ``value`` with what JSON cannot hold as text: ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, or ``repr``."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "tolist"):  # numpy's scalars and arrays, tensors
        return as_json(value.tolist())
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    return repr(value)
