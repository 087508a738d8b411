"""Starts a run of a trial: files, command and environment, for this machine or another."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from det_lightning.compat import ALIAS_DIRECTORY
from det_lightning.core._task import TASK_VARIABLE, TrialTask
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.log_policies import find_retry_policy
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import OrphanedRun, RecordReader, TrialProcess
from det_lightning.files.strict_json import to_json
from det_lightning.startup_hook import STARTUP_HOOK

_GRACE_S = 600.0

# As in Determined's containers, a failing command in the hook ends the run. If the hook ends the run, a record says so.
_WITH_HOOK = """
det_lightning_records=$1
shift
det_lightning_report() {
    echo '{"group": "startup_hook", "steps_completed": null, "metrics": {}}' >> "$det_lightning_records"
}
set -e
trap det_lightning_report EXIT
. ./startup-hook.sh
trap - EXIT
exec "$@"
"""


@dataclasses.dataclass(frozen=True)
class TrialStart:
    """A run of a trial with all files written, to start on any machine with access to the files.

    ``variables`` come from the configuration; ``lines_read`` lines of the trial's metrics were already read.
    """

    task: TrialTask
    variables: dict[str, str]
    lines_read: int = 0

    def start(
        self, environment: Mapping[str, str], devices: Iterable[int | str], *, detached: bool = False
    ) -> TrialProcess:
        """Start the run on this machine with these GPUs. With ``detached``, the run is no child of this process.

        The run gets ``environment`` in addition to the variables of the configuration and the platform.
        """
        workdir = find_workdir(self.task)
        command = make_command(self.task.config["entrypoint"], len(self.task.slots))
        timeout_s = self.task.config.get("preemption_timeout")
        if (workdir / STARTUP_HOOK).is_file():
            command = ["bash", "-c", _WITH_HOOK, STARTUP_HOOK, str(self.task.metrics_file), *command]
        return TrialProcess(
            self.task.directory,
            command,
            workdir,
            {**self._environment(environment), "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))},
            run=self.task.run_id,
            grace_s=_GRACE_S if timeout_s is None else timeout_s,
            records=RecordReader(self.task.metrics_file, self.lines_read),
            detached=detached,
        )

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


class PreparingLauncher:
    """The part of a launcher that writes the files of new runs and reads the files of earlier runs.

    ``warm_start`` is the checkpoint to start trials from, or None.
    """

    def __init__(
        self, directory: ExperimentDirectory, config: dict[str, Any], are_gpus: bool, warm_start: str | None
    ) -> None:
        self._directory = directory
        self._config = config
        self._variables = _read_variables(config, are_gpus)
        self._warm_start = warm_start

    def prepare(
        self, trial: TrialRecord, state: ExperimentState, slots: list[int], gpu_uuids: Sequence[str] = ()
    ) -> TrialStart:
        """Write the files of run number ``trial.runs`` of a trial."""
        task = dataclasses.replace(self._task(trial, state, slots), gpu_uuids=list(gpu_uuids))
        workdir = find_workdir(task)
        if workdir.exists():
            shutil.rmtree(workdir)
        shutil.copytree(self._directory.code, workdir)
        task.write()
        return TrialStart(task, self._variables, trial.lines_read)

    def adopt(self, trial: TrialRecord) -> OrphanedRun:
        return OrphanedRun(self._directory.trial(trial.trial_id), trial.runs, trial.lines_read)

    def find_retry_policy(self, trial_id: int) -> str | None:
        return find_retry_policy(self._config, self._directory.trial(trial_id) / "log.txt")

    def _task(self, trial: TrialRecord, state: ExperimentState, slots: list[int]) -> TrialTask:
        newest = trial.newest_checkpoint()
        directory = self._directory.trial(trial.trial_id)
        directory.mkdir(parents=True, exist_ok=True)
        return TrialTask(
            directory=directory,
            experiment_id=self._directory.experiment_id,
            trial_id=trial.trial_id,
            run_id=trial.runs,
            trial_seed=trial.trial_seed,
            hparams=trial.hparams,
            config=self._config,
            slots=slots,
            checkpoint_storage=self._directory.checkpoint_storage(),
            latest_checkpoint=self._warm_start if newest is None else newest.checkpoint_id,
            steps_completed=0 if newest is None else newest.steps_completed,
            validate_at=trial.validate_at,
            best_validation=state.best(state.find_best(other) for other in state.trials.values()),
            loggers=self._directory.loggers(),
            recorded=[] if newest is None else list(newest.sha256),
            trusted=self._directory.is_trusted(),
        )


def find_workdir(task: TrialTask) -> Path:
    """Return the working directory of a trial's processes, with a copy of the code."""
    return task.directory / "workdir"


def _read_variables(config: dict[str, Any], are_gpus: bool) -> dict[str, str]:
    """Return the variables of the section ``environment``; a name without a value passes on this process's value."""
    given = (config.get("environment") or {}).get("environment_variables") or []
    if isinstance(given, dict):
        given = given.get("cuda" if are_gpus else "cpu") or []
    pairs = [variable.partition("=") for variable in given]
    passed_on = {name: os.environ[name] for name, equals, _ in pairs if not equals and name in os.environ}
    return {**passed_on, **{name: value for name, equals, value in pairs if equals}}


_CLASS = re.compile(r"[\w.]+:[\w.]+")


def is_class(entrypoint: str | list[str]) -> bool:
    """Return whether an entrypoint names a trial class, as ``module:Class``."""
    return isinstance(entrypoint, str) and _CLASS.fullmatch(entrypoint) is not None


def make_command(entrypoint: str | list[str], slots: int) -> list[str]:
    """Return the command that runs an entrypoint in ``slots`` processes.

    The harness trains a class, under torchrun if there are several processes. Any other string is a shell command, and
    a list is the command itself.
    """
    if isinstance(entrypoint, list):
        return entrypoint
    if not is_class(entrypoint):
        return ["sh", "-c", entrypoint]
    harness = [sys.executable, "-m", "det_lightning.exec.harness", entrypoint]
    if slots <= 1:
        return harness
    launcher = [sys.executable, "-m", "det_lightning.launch.torch_distributed", "--nproc-per-node", str(slots), "--"]
    return [*launcher, *harness]
