"""Where the trials of an experiment run, and how much of it they take."""

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
        slots_per_trial: processes of each trial; 0 is one that needs no GPU.
        max_slots: the most that all trials may take; None sets no limit.
        on_cpu: whether to use no GPUs.
    """

    slots_per_trial: int
    max_slots: int | None = None
    on_cpu: bool = False

    def check_limit(self) -> None:
        """Check that one trial may run.

        Raises:
            ExperimentError: it needs more than ``max_slots``.
        """
        if self.max_slots is not None and self.max_slots < self.slots_per_trial:
            raise errors.ExperimentError(
                f"resources.max_slots is {self.max_slots}, too few for trials of {self.slots_per_trial} slots."
            )


class Machines(Protocol):
    """This machine, or the nodes of a cluster."""

    def check(self, demand: Demand, folder: Path) -> None:
        """Check that trials can run, with the experiment's directory in ``folder``, or in a parent if that is missing.

        Raises:
            ExperimentError: they cannot.
        """

    def launcher(
        self, directory: ExperimentDirectory, config: dict[str, Any], demand: Demand, warm_start: str | None
    ) -> Launcher:
        """Return what starts the trials of an experiment.

        Args:
            directory: the experiment's.
            config: its configuration, with all defaults.
            demand: what its trials need.
            warm_start: the checkpoint that trials start from; None: they start from scratch.

        Raises:
            ExperimentError: they cannot run here.
        """
