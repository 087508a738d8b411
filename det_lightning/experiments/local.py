"""Trials as processes of this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.core._task import TASK_VARIABLE, TrialTask
from det_lightning.errors import PREEMPTED_EXIT_CODE
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.entrypoint import command_of
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import RecordReader, TrialProcess, is_running, recorded_status

_GRACE_S = 600.0
# Answers to the name of Determined with det_lightning, in the processes of trials only.
_ALIAS = """\
import sys

del sys.modules["determined"]
from det_lightning import compat

compat.install()
import determined
"""


@dataclasses.dataclass(frozen=True)
class Devices:
    """The slots of this machine, and what they are.

    Attributes:
        slots: GPUs by their indices; on the CPU the numbers of processes that may run.
        are_gpus: which of the two.
    """

    slots: tuple[int, ...]
    are_gpus: bool

    def limited_to(self, most: int | None) -> Devices:
        """Return the first of them, ``most`` at the most; None: all."""
        return self if most is None else dataclasses.replace(self, slots=self.slots[:most])


class LocalLauncher:
    """Starts trials as processes of this machine, as many at once as there are slots for.

    Args:
        directory: the experiment's.
        config: its configuration, with all defaults.
        devices: the slots that it may use.
        slots_per_trial: how many each trial takes.
        warm_start: the checkpoint that trials start from; None: they start from scratch.
    """

    def __init__(
        self,
        directory: ExperimentDirectory,
        config: dict[str, Any],
        devices: Devices,
        slots_per_trial: int,
        warm_start: str | None = None,
    ) -> None:
        self._directory = directory
        self._config = config
        self._devices = devices
        self._slots_per_trial = slots_per_trial
        self._warm_start = warm_start
        self._free = list(devices.slots)
        self._held: dict[int, list[int]] = {}
        write_alias(directory)

    def has_room(self) -> bool:
        """Return whether another trial can be started."""
        return len(self._free) >= max(self._slots_per_trial, 1)

    def start(self, trial: TrialRecord, state: ExperimentState) -> TrialProcess:
        """Start a run of a trial.

        Raises:
            OSError: files cannot be written, or no process can be started.
        """
        taken = max(self._slots_per_trial, 1)
        self._held[trial.trial_id] = self._free[:taken]
        del self._free[:taken]
        task = self._task(trial, state)
        workdir = task.directory / "workdir"
        if workdir.exists():
            shutil.rmtree(workdir)
        shutil.copytree(self._directory.code, workdir)
        task.write()
        command = command_of(self._config["entrypoint"], len(task.slots))
        if (workdir / "startup-hook.sh").is_file():
            command = ["bash", "-c", '. ./startup-hook.sh && exec "$@"', "startup-hook.sh", *command]
        return TrialProcess(
            task.directory,
            command,
            workdir,
            self._environment(task, workdir),
            run=trial.runs,
            grace_s=self._config.get("preemption_timeout") or _GRACE_S,
            records=RecordReader(task.metrics_file, trial.lines_read),
        )

    def adopt(self, trial: TrialRecord) -> OrphanedRun:
        """Return the run of a trial that a killed runner has left."""
        return OrphanedRun(self._directory.trial(trial.trial_id), trial.runs, trial.lines_read)

    def release(self, trial_id: int) -> None:
        """Take back the slots of a trial."""
        self._free = sorted([*self._free, *self._held.pop(trial_id, [])])

    def retries_cancelled_by(self, trial_id: int) -> str | None:
        """Return the log policy that matches a line of the trial's log and cancels retries."""
        patterns = {
            policy["pattern"]: policy.get("name") or policy["pattern"]
            for policy in self._config.get("log_policies") or []
            if policy.get("pattern") and _action_of(policy) == "cancel_retries"
        }
        if not patterns:
            return None
        with (self._directory.trial(trial_id) / "log.txt").open(encoding="utf-8", errors="replace") as log:
            for line in log:
                for pattern, name in patterns.items():
                    if re.search(pattern, line):
                        return str(name)
        return None

    def _task(self, trial: TrialRecord, state: ExperimentState) -> TrialTask:
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
            slots=self._held[trial.trial_id],
            checkpoint_storage=self._directory.checkpoint_storage(),
            latest_checkpoint=self._warm_start if newest is None else newest.checkpoint_id,
            steps_completed=0 if newest is None else newest.steps_completed,
            validate_at=trial.validate_at,
            best_validation=state.best(state.best_of(other) for other in state.trials.values()),
            loggers=self._directory.loggers(),
        )

    def _environment(self, task: TrialTask, workdir: Path) -> dict[str, str]:
        """Return the environment of the trial's processes: this one's, and what Determined's platform sets."""
        given = {**os.environ, **_given_variables(self._config, self._devices.are_gpus)}
        search_path = [str(workdir), str(self._directory.alias), given.get("PYTHONPATH", "")]
        variables = {
            TASK_VARIABLE: str(task.file),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), given.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
            "PYTHONUNBUFFERED": "1",
            "DET_EXPERIMENT_ID": str(task.experiment_id),
            "DET_TRIAL_ID": str(task.trial_id),
            "DET_TRIAL_RUN_ID": str(task.run_id),
            "DET_TRIAL_SEED": str(task.trial_seed),
            "DET_EXPERIMENT_CONFIG": json.dumps(task.config),
            "DET_HPARAMS": json.dumps(task.hparams),
            "DET_STEPS_COMPLETED": str(task.steps_completed),
            "DET_TASK_TYPE": "TRIAL",
            "DET_SLOT_IDS": json.dumps(task.slots),
        }
        if task.latest_checkpoint is not None:
            variables["DET_LATEST_CHECKPOINT"] = task.latest_checkpoint
        # The processes of a trial must see its own devices only.
        visible = ",".join(map(str, task.slots)) if self._devices.are_gpus and self._slots_per_trial else ""
        return {**given, **variables, "CUDA_VISIBLE_DEVICES": visible}


class OrphanedRun:
    """A run whose runner was killed: its supervisor has noticed, and the trial saves and ends.

    Args:
        directory: the trial's.
        run: number of the run.
        lines_read: how much of its metrics was read.
    """

    def __init__(self, directory: Path, run: int, lines_read: int) -> None:
        self._directory = directory
        self._run = run
        self.new_records = RecordReader(directory / "metrics.jsonl", lines_read).new_records

    def has_ended(self) -> bool:
        """Return whether all its processes have ended."""
        return not is_running(self._directory)

    def exit_status(self) -> int:
        """Return its exit status; where all was killed at once it counts as preempted, which is not its fault."""
        status = recorded_status(self._directory, self._run)
        return PREEMPTED_EXIT_CODE if status is None else status

    def stop(self) -> None:
        """Do nothing: it is ending."""

    def kill(self) -> None:
        """Do nothing: its supervisor kills it if it takes too long."""


def devices_for(slots_per_trial: int, on_cpu: bool) -> Devices:
    """Return the devices of this machine that trials of so many slots can use.

    Raises:
        ExperimentError: there are too few GPUs.
    """
    gpus = () if on_cpu or slots_per_trial == 0 else visible_gpus()
    if on_cpu or slots_per_trial == 0 or (not gpus and slots_per_trial == 1):
        processes = max(os.cpu_count() or 1, slots_per_trial)
        return Devices(tuple(range(processes)), are_gpus=False)
    if slots_per_trial > len(gpus):
        fewer = f"--slots {len(gpus)} for trials of {len(gpus)} processes, or " if gpus else ""
        raise errors.ExperimentError(
            f"resources.slots_per_trial is {slots_per_trial}, and this machine has {len(gpus) or 'no'} GPUs. Use "
            f"{fewer}--cpu for {slots_per_trial} processes on the CPU, or --slots N for another number."
        )
    return Devices(gpus, are_gpus=True)


def visible_gpus() -> tuple[int, ...]:
    """Return the indices of the GPUs that this process may use, without the seconds that importing torch takes."""
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    indices = tuple(range(sum(line.startswith("GPU ") for line in listed.splitlines())))
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return indices
    return tuple(int(index) for index in allowed.split(",") if index.strip().isdigit() and int(index) in indices)


def write_alias(directory: ExperimentDirectory) -> None:
    """Write the package that answers to the name ``determined`` in the processes of trials."""
    package = directory.alias / "determined"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_ALIAS, encoding="utf-8")


def _given_variables(config: dict[str, Any], are_gpus: bool) -> dict[str, str]:
    """Return the variables of the section ``environment``; a name alone passes this process's value on."""
    given = (config.get("environment") or {}).get("environment_variables") or []
    if isinstance(given, dict):
        given = given.get("cuda" if are_gpus else "cpu") or []
    pairs = (variable.partition("=") for variable in given)
    return {name: value for name, equals, value in pairs if equals}


def _action_of(policy: dict[str, Any]) -> str | None:
    action = policy.get("action")
    return action.get("type") if isinstance(action, dict) else action
