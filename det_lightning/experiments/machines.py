"""Where the trials of an experiment run, and what they need there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from det_lightning import errors
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.runner import Launcher


@dataclasses.dataclass(frozen=True)
class Demand:
    """What the trials of an experiment need.

    Attributes:
        slots_per_trial: processes of each trial; 0 means one process that needs no GPU.
        max_slots: the most slots that all trials together may take; None sets no limit.
        on_cpu: whether to leave GPUs unused.
    """

    slots_per_trial: int
    max_slots: int | None = None
    on_cpu: bool = False

    def check_limit(self) -> None:
        """Check that the limit allows one trial.

        Raises:
            ExperimentError: a trial needs more than ``max_slots``.
        """
        if self.max_slots is not None and self.max_slots < self.slots_per_trial:
            raise errors.ExperimentError(
                f"resources.max_slots is {self.max_slots}, too few for trials of {self.slots_per_trial} slots."
            )


class Machines(Protocol):
    """This machine, or the nodes of a cluster."""

    def check(self, demand: Demand, folder: Path) -> None:
        """Check that trials can run with the experiment's directory in ``folder``, or its nearest existing parent.

        Raises:
            ExperimentError: they cannot.
        """

    def launcher(
        self, directory: ExperimentDirectory, config: dict[str, Any], demand: Demand, warm_start: str | None
    ) -> Launcher:
        """Return the launcher that starts the trials of an experiment.

        Args:
            directory: the experiment's.
            config: its configuration, with all defaults.
            demand: what its trials need.
            warm_start: the checkpoint that trials start from; None to start from scratch.

        Raises:
            ExperimentError: they cannot run here.
        """
