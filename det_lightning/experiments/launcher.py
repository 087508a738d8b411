"""What every launcher of trials does: the files, command and environment of a run, and the interface of machines."""

from __future__ import annotations

import abc
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from det_lightning import errors
from det_lightning.compat import ALIAS_DIRECTORY
from det_lightning.core._task import NODES, TASK_VARIABLE, TRY_VARIABLE, TrialTask
from det_lightning.experiments.checkpoint_lookup import CheckpointLookup
from det_lightning.experiments.directory import ExperimentDirectory, Options
from det_lightning.experiments.hook_progress import add_hook
from det_lightning.experiments.log_policies import find_retry_policy
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import OrphanedRun, RecordReader, TrialProcess
from det_lightning.files.local_files import write_whole
from det_lightning.files.logs import find_error, read_end
from det_lightning.files.strict_json import to_json

_GRACE_S = 600.0


@dataclasses.dataclass(frozen=True)
class Demand:
    """The devices that an experiment's trials need; 0 slots: a process without a GPU; ``max_slots`` None: no limit."""

    slots_per_trial: int
    max_slots: int | None = None
    on_cpu: bool = False

    def check_limit(self) -> None:
        if self.max_slots is not None and self.max_slots < self.slots_per_trial:
            raise errors.ExperimentError(
                f"resources.max_slots is {self.max_slots}, too few for trials of {self.slots_per_trial} slots."
            )


#: Notes an event of a type with its entries.
Record = Callable[..., object]


class StartedRun(Protocol):
    """A started run of a trial."""

    def has_ended(self) -> bool:
        """Return whether all processes of the run have ended."""

    def exit_status(self) -> int | None:
        """Return the exit status, as a shell shows it; None if lost."""

    def problem(self) -> str | None:
        """Return why an ended run has failed, if the entrypoint did not begin or its status is lost."""

    def stop(self) -> None:
        """Ask the run to save and end."""

    def kill(self) -> None:
        """End the run at once."""


@dataclasses.dataclass(frozen=True)
class TrialStart:
    """A run of a trial, or its part on a node, to start on any machine with access to the experiment's files.

    ``code`` is the experiment's copy of the code; ``variables`` come from the configuration.
    """

    task: TrialTask
    code: Path
    variables: dict[str, str]

    def take_part(self, rank: int, addresses: list[str], port: int) -> TrialStart:
        """Return the part of the run for the node with this rank; the nodes meet at a port of the first address."""
        if len(addresses) == 1:
            return self
        slots = list(range(len(self.task.slots) // len(addresses)))
        task = dataclasses.replace(self.task, slots=slots, container_addrs=addresses, container_rank=rank)
        return dataclasses.replace(self, task=task, variables={"C10D_PORT": str(port), **self.variables})

    def start(
        self, environment: Mapping[str, str], devices: Iterable[int | str], *, detached: bool = False
    ) -> TrialProcess:
        """Start the run on this machine with these GPUs; if ``detached``, not as a child of this process.

        The run gets ``environment`` in addition to the variables of the configuration and the platform.
        """
        directory = self.task.node_directory
        directory.mkdir(parents=True, exist_ok=True)
        workdir = find_workdir(self.task)
        if workdir.exists():
            shutil.rmtree(workdir)
        shutil.copytree(self.code, workdir)
        if directory != self.task.directory:  # the trial's own has the task already
            self.task.write()
        command = add_hook(make_command(self.task), workdir, directory)
        variables = {**self._environment(environment), "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
        return TrialProcess(self.task, command, workdir, variables, self.grace_s, detached)

    @property
    def grace_s(self) -> float:
        """How long the run may take to save and end on request."""
        return read_grace(self.task.config)

    def _environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return ``environment`` with the variables of the configuration and of Determined's platform."""
        task = self.task
        given = {**environment, **self.variables}
        # Only in the processes of trials, importing determined imports det_lightning.
        search_path = [str(find_workdir(task)), str(ALIAS_DIRECTORY), given.get("PYTHONPATH", "")]
        variables = {
            TASK_VARIABLE: str(task.file),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), given.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
            "PYTHONUNBUFFERED": "1",
            "DET_EXPERIMENT_ID": str(task.experiment_id),
            "DET_TRIAL_ID": str(task.trial_id),
            "DET_TRIAL_RUN_ID": str(task.run_id),
            "DET_TRIAL_SEED": str(task.trial_seed),
            "DET_EXPERIMENT_CONFIG": to_json(task.config),
            "DET_HPARAMS": to_json(task.hparams),
            "DET_STEPS_COMPLETED": str(task.steps_completed),
            "DET_TASK_TYPE": "TRIAL",
            "DET_SLOT_IDS": to_json(task.slots),
        }
        if task.latest_checkpoint is not None:
            variables["DET_LATEST_CHECKPOINT"] = task.latest_checkpoint
        return {**given, **variables}


class Launcher(abc.ABC):
    """Starts trials on this machine, or on the nodes of a cluster, where there is room.

    ``checkpoints`` finds the checkpoints that a trial can start from. A subclass raises an ExperimentError if the
    demand is more than its machines have, and says whether trials use GPUs.
    """

    def __init__(
        self,
        directory: ExperimentDirectory,
        config: dict[str, Any],
        options: Options,
        demand: Demand,
        *,
        are_gpus: bool = False,
    ) -> None:
        self._directory = directory
        self._config = config
        self._options = options
        self._variables = {**_read_variables(config, are_gpus), **({TRY_VARIABLE: "1"} if options.tries else {})}
        self._log_starts: dict[int, int] = {}  # by trial, the size of the log before the newest run
        self._storage = directory.checkpoint_storage()
        self.checkpoints = CheckpointLookup(self._storage, variables=self._variables)

    @staticmethod
    @abc.abstractmethod
    def check(demand: Demand, folder: Path) -> None:
        """Check that trials can run with their experiment in ``folder``, or in its nearest existing parent."""

    @abc.abstractmethod
    def has_room(self) -> bool:
        """Return whether another trial can be started."""

    @abc.abstractmethod
    def start(self, trial: TrialRecord, state: ExperimentState, record: Record) -> StartedRun:
        """Start the next run of a trial, number ``trial.runs``; ``record`` notes events of the run."""

    @abc.abstractmethod
    def release(self, trial_id: int) -> None:
        """Free the slots of an ended run."""

    def prepare(
        self, trial: TrialRecord, state: ExperimentState, slots: list[int], gpu_uuids: Sequence[str] = ()
    ) -> TrialStart:
        """Write the task of run number ``trial.runs`` of a trial, which starts from ``trial.start``."""
        start = trial.start
        directory = self._directory.trial(trial.trial_id)
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(directory / NODES, ignore_errors=True)
        task = TrialTask(
            directory=directory,
            experiment_id=self._directory.experiment_id,
            trial_id=trial.trial_id,
            run_id=trial.runs,
            trial_seed=trial.trial_seed,
            hparams=trial.hparams,
            config=self._config,
            slots=slots,
            checkpoint_storage=self._storage,
            latest_checkpoint=self._options.source_checkpoint if start is None else start.checkpoint_id,
            steps_completed=0 if start is None else start.steps_completed,
            validate_at=trial.validate_at,
            best_validation=state.best(state.find_best(other) for other in state.trials.values()),
            gpu_uuids=list(gpu_uuids),
            loggers=self._options.loggers,
            recorded=[] if start is None else list(start.sha256),
            trusted=self._options.trusted,
        )
        log = self._find_log(trial.trial_id)
        self._log_starts[trial.trial_id] = log.stat().st_size if log.exists() else 0
        task.write()
        return TrialStart(task, self._directory.code, self._variables)

    def adopt(self, trial: TrialRecord) -> StartedRun:
        """Return the run that a killed runner left behind, whose trial saves and ends by itself."""
        return OrphanedRun(self._directory.trial(trial.trial_id), trial.runs, read_grace(self._config))

    def publish_best(self, state: ExperimentState) -> None:
        """Write the best metric of each trial to the file that trials read at each validation."""
        best = {trial.trial_id: state.find_best(trial) for trial in state.trials.values()}
        known = {trial_id: value for trial_id, value in best.items() if value is not None}
        write_whole(self._directory.best, to_json(known).encode())

    def open_records(self, trial: TrialRecord) -> RecordReader:
        """Return a reader for those reports of the trial that are not in the log yet."""
        return RecordReader(self._directory.trial(trial.trial_id) / "metrics.jsonl", trial.lines_read)

    def find_retry_policy(self, trial_id: int) -> str | None:
        """Return the log policy that forbids restarting the trial after a failure, or None."""
        return find_retry_policy(self._config, self._find_log(trial_id))

    def find_error(self, trial_id: int) -> str:
        """Return the error in the log of a run that this launcher started; empty if there is none."""
        start = self._log_starts.get(trial_id)
        return "" if start is None else find_error(read_end(self._find_log(trial_id), start))

    def _find_log(self, trial_id: int) -> Path:
        return self._directory.trial(trial_id) / "log.txt"


def read_grace(config: Mapping[str, Any]) -> float:
    """Return how long a run may take to save and end on request, in seconds."""
    timeout_s = config.get("preemption_timeout")
    return _GRACE_S if timeout_s is None else float(timeout_s)


def find_workdir(task: TrialTask) -> Path:
    """Return the working directory of a trial's processes, with a copy of the code."""
    return task.node_directory / "workdir"


def _read_variables(config: dict[str, Any], are_gpus: bool) -> dict[str, str]:
    """Return the variables of the section ``environment``; a name without a value passes on this process's value."""
    given = (config.get("environment") or {}).get("environment_variables") or []
    if isinstance(given, dict):
        given = given.get("cuda" if are_gpus else "cpu") or []
    pairs = [variable.partition("=") for variable in given]
    passed_on = {name: os.environ[name] for name, equals, _ in pairs if not equals and name in os.environ}
    return {**passed_on, **{name: value for name, equals, value in pairs if equals}}


_CLASS = re.compile(r"[\w.]+:[\w.]+")


def make_command(task: TrialTask) -> list[str]:
    """Return the command that runs the entrypoint of an experiment in a process for each slot of this node.

    The harness trains a class, under torchrun if there are several processes. Any other string is a shell command, and
    a list is the command itself.
    """
    entrypoint: str | list[str] = task.config["entrypoint"]
    if isinstance(entrypoint, list):
        return entrypoint
    if _CLASS.fullmatch(entrypoint) is None:
        return ["sh", "-c", entrypoint]
    harness = [sys.executable, "-m", "det_lightning.exec.harness", entrypoint]
    if task.world_size <= 1:
        return harness
    return [sys.executable, "-m", "det_lightning.launch.torch_distributed", "--", *harness]
