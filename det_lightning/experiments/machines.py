"""The interface between the runner and the machines: demands, launchers, and started runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from det_lightning import errors
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.state import ExperimentState, TrialRecord


@dataclasses.dataclass(frozen=True)
class Demand:
    """The devices for an experiment's trials; 0 slots are a process without a GPU, ``max_slots`` None is no limit."""

    slots_per_trial: int
    max_slots: int | None = None
    on_cpu: bool = False

    def check_limit(self) -> None:
        if self.max_slots is not None and self.max_slots < self.slots_per_trial:
            raise errors.ExperimentError(
                f"resources.max_slots is {self.max_slots}, too few for trials of {self.slots_per_trial} slots."
            )


class StartedRun(Protocol):
    """A started run of a trial."""

    def has_ended(self) -> bool:
        """Return whether all processes of the run have ended."""

    def exit_status(self) -> int | None:
        """Return the exit status, as a shell shows it; None if lost."""

    def new_records(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the reports of the trial since the last call, each with its line number."""

    def stop(self) -> None:
        """Ask the run to save and end."""

    def kill(self) -> None:
        """End the run at once."""


class Launcher(Protocol):
    """Starts trials where there is room."""

    def has_room(self) -> bool:
        """Return whether another trial can be started."""

    def start(self, trial: TrialRecord, state: ExperimentState) -> StartedRun:
        """Start the next run of a trial, number ``trial.runs``."""

    def adopt(self, trial: TrialRecord) -> StartedRun:
        """Return the run left behind by a killed runner; the trial saves and ends by itself."""

    def release(self, trial_id: int) -> None:
        """Take back the slots of an ended run."""

    def find_retry_policy(self, trial_id: int) -> str | None:
        """Return the log policy that forbids restarting the trial after a failure, or None."""


class Machines(Protocol):
    """This machine, or the nodes of a cluster. Both methods raise an ExperimentError if the trials cannot run there."""

    def check(self, demand: Demand, folder: Path) -> None:
        """Check that trials can run with the experiment's directory in ``folder``, or the nearest existing parent."""

    def make_launcher(
        self, directory: ExperimentDirectory, config: dict[str, Any], demand: Demand, warm_start: str | None
    ) -> Launcher:
        """Return the launcher of the trials; each starts from the checkpoint ``warm_start`` unless None."""
