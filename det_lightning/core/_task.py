"""The task of a trial's processes, as the experiment's runner wrote it; their reports; a run's directory."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_lightning import errors
from det_lightning.escaping import get_logger
from det_lightning.files.local_files import write_private
from det_lightning.files.plain_values import as_plain
from det_lightning.files.strict_json import as_number, is_shallow, to_json

logger = get_logger(__name__)

if TYPE_CHECKING:
    from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage

#: The environment variable that names the file of the task.
TASK_VARIABLE = "DET_LIGHTNING_TASK"
#: The environment variable of a smoke run (``--try``), and how many batches a trial then trains.
TRY_VARIABLE = "DET_LIGHTNING_TRY"
TRY_BATCHES = 4

#: The directory in a trial's directory with the files of each node, if the trial runs on several nodes.
NODES = "nodes"

_try_storages: list[str] = []

# The year 10000, later than any clock shows.
_END_OF_TIME = 253402300800


@dataclasses.dataclass(frozen=True)
class TrialTask:
    """A run of a trial of an experiment."""

    directory: Path  # the trial's directory, for its reports
    experiment_id: int  # from 1
    trial_id: int  # in the experiment, from 1
    run_id: int  # how often the trial was started, from 1
    trial_seed: int  # for the random generators of the trial
    hparams: dict[str, Any]  # the values that the search drew
    config: dict[str, Any]  # the experiment configuration with all defaults
    slots: list[int]  # indices of the devices on this node, or of processes on the CPU
    checkpoint_storage: str | dict[str, Any]  # a directory, or a section of a configuration
    latest_checkpoint: str | None = None  # the start of the run: the trial's newest checkpoint, or a warm start
    steps_completed: int = 0  # number of batches trained for the trial's newest checkpoint
    validate_at: list[int] = dataclasses.field(default_factory=list)  # lengths, in units of the search
    best_validation: float | None = None  # the experiment's best value of the searcher's metric when the run began
    gpu_uuids: list[str] = dataclasses.field(default_factory=list)  # identifiers of the devices; empty on the CPU
    loggers: list[str] = dataclasses.field(default_factory=list)  # names of Lightning's loggers for this run
    recorded: list[str] = dataclasses.field(default_factory=list)  # SHA-256 of files of the newest checkpoint
    trusted: bool = False  # whether to resume from any checkpoint with objects, by any author
    container_addrs: list[str] = dataclasses.field(default_factory=lambda: ["127.0.0.1"])  # of the trial's nodes
    container_rank: int = 0  # index of this node

    @property
    def world_size(self) -> int:
        """The number of slots on all nodes; each node has the same number."""
        return len(self.slots) * len(self.container_addrs)

    @property
    def node_directory(self) -> Path:
        """The directory with the files of this node's part of the run; the trial's own if there is only one node."""
        several = len(self.container_addrs) > 1
        return self.directory / NODES / str(self.container_rank) if several else self.directory

    @property
    def file(self) -> Path:
        """The file of the task."""
        return self.node_directory / "task.json"

    @property
    def metrics_file(self) -> Path:
        """The file of the trial's metrics."""
        return self.directory / "metrics.jsonl"

    @property
    def tensorboard_path(self) -> Path:
        """The directory of the trial's TensorBoard files, unless the code names another."""
        return self.directory / "tensorboard"

    def best_of_others(self) -> float | None:
        """Return the best value of the searcher's metric in the other trials so far, if any."""
        return self.best_of_experiment(leave_out=self.trial_id)

    def best_of_experiment(self, leave_out: int | None = None) -> float | None:
        """Return the best value of the searcher's metric in all trials so far, if any, without the trial ``leave_out``.

        On a machine without the runner's file, return the experiment's best value at the start of the run.
        """
        try:
            best = json.loads(self.directory.with_name("best.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return as_number(self.best_validation)
        found = {int(trial_id): as_number(value) for trial_id, value in best.items()}
        values = [value for trial_id, value in found.items() if value is not None and trial_id != leave_out]
        choose = min if self.config["searcher"]["smaller_is_better"] else max
        return choose(values, default=None)

    def write(self) -> None:
        """Write the task to :attr:`file`, for the processes of the trial."""
        content = {**dataclasses.asdict(self), "directory": str(self.directory)}
        write_private(self.file, to_json(content))

    @classmethod
    def read(cls, file: Path) -> TrialTask:
        """Read the file of a task; raise an OSError if that fails."""
        content = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**content, "directory": Path(content["directory"])})

    def report_begun(
        self, checkpoint_id: str, steps_completed: float, storage: CheckpointStorage, sha256: Sequence[str] = ()
    ) -> None:
        """Announce a checkpoint before it is complete, so that the experiment finds it even if this process is killed.

        The record names the storage if it is not that of the experiment.
        """
        values: dict[str, Any] = {"checkpoint_id": checkpoint_id}
        if sha256:
            values["sha256"] = list(sha256)
        if storage.root.url != self._find_storage_url():
            values["storage"] = str(storage)
        self.report("checkpoint_begun", steps_completed, values)

    def _find_storage_url(self) -> str | None:
        """Return the path or URL of the experiment's storage; None if it cannot be opened here."""
        # Here, because `import det_lightning` needs no libraries for storages.
        from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage

        with contextlib.suppress(errors.StorageError, ValueError):
            return CheckpointStorage(self.checkpoint_storage).root.url
        return None

    def report(self, group: str, steps_completed: float | None, metrics: dict[str, Any]) -> None:
        """Append a record to the metrics of the trial, synced to disk.

        ``group`` is ``"training"``, ``"validation"``, or another name. A value that JSON cannot hold is left out with a
        warning.
        """
        losses: list[str] = []
        plain = as_plain(metrics, f"{group} metrics", losses)
        for note in losses:
            _warn_once(note)
        record = {"group": group, "run": self.run_id, "steps_completed": steps_completed, "metrics": plain}
        record["time"] = time.time()
        with self.metrics_file.open("a+b") as file:
            # After a full disk, or a crash of the machine, the last line may lack its end.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            begin = b"" if file.read() in (b"", b"\n") else b"\n"
            # A single write, so that a reader sees a whole line or none.
            file.write(begin + to_json(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read_reports(self) -> Iterator[dict[str, Any]]:
        """Yield the records of this run so far; lines that are no records are left out."""
        if not self.metrics_file.exists():
            return
        with self.metrics_file.open("rb") as file:
            records = filter(None, map(_read_if_usable, file))
            yield from (record for record in records if record.get("run") == self.run_id)


def _read_if_usable(line: bytes) -> dict[str, Any] | None:
    try:
        return read_record(line)
    except ValueError:  # of which the runner tells
        return None


def read_record(line: bytes) -> dict[str, Any]:
    """Parse a line of ``metrics.jsonl``; raise a ValueError with the reason if it is not a record.

    Any process of a trial may write to the file. The time is 0 if the line has none.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError("is not JSON; perhaps a full disk cut it off") from e
    if not isinstance(record, dict) or not is_shallow(record):
        raise ValueError("is not a report of a trial: expected an object with group, steps_completed and metrics")
    record = {"time": 0.0, **record}
    steps = record.get("steps_completed", "missing")
    is_usable = {
        "group": isinstance(record.get("group"), str),
        "steps_completed": _is_number_below(0 if steps is None else steps, 2**53),
        "metrics": isinstance(record.get("metrics"), dict),
        "time": _is_number_below(record["time"], _END_OF_TIME),
    }
    if wrong := [name for name, usable in is_usable.items() if not usable]:
        raise ValueError(f"is not a report of a trial: no usable {', '.join(wrong)}")
    return record


def _is_number_below(value: Any, end: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < end


def is_try() -> bool:
    """Return whether this process is a smoke run, which ends early and keeps no checkpoint."""
    return bool(os.environ.get(TRY_VARIABLE))


@functools.cache
def make_try_storage() -> str:
    """Return the directory for a smoke run's checkpoints outside of experiments, removed when the process ends."""
    directory = tempfile.mkdtemp(prefix="det-lightning-try-")
    _try_storages.append(directory)
    atexit.register(remove_try_storages)
    return directory


def remove_try_storages() -> None:
    """Remove the directories of a smoke run; called also before a signal ends the process, which skips ``atexit``."""
    while _try_storages:
        shutil.rmtree(_try_storages.pop(), ignore_errors=True)


def current_task() -> TrialTask | None:
    """Return the task of this process, None outside of experiments; for errors see :meth:`TrialTask.read`."""
    file = os.environ.get(TASK_VARIABLE)
    return TrialTask.read(Path(file)) if file else None


@functools.cache
def _warn_once(note: str) -> None:
    logger.warning("Not everything is reported to the experiment: %s.", note)


# Weak references, so that the run can be freed.
_latest: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def default_directory() -> Path:
    """Return a new directory below ``runs/``."""
    started = datetime.datetime.now().strftime("%b%d_%H-%M-%S")
    return Path(f"runs/{started}_{socket.gethostname()}")


def remember_run(run: Any) -> None:
    """Remember the latest run and its ``tensorboard`` for objects that trials create without a context."""
    _latest["run"] = run


def latest_run() -> Any:
    """Return the latest run; None before the first one, and once it was freed."""
    return _latest.get("run")
