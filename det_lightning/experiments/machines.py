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
    """What an experiment's trials need; 0 slots are one process without a GPU, and ``max_slots`` None is no limit."""

    slots_per_trial: int
    max_slots: int | None = None
    on_cpu: bool = False

    def check_limit(self) -> None:
        if self.max_slots is not None and self.max_slots < self.slots_per_trial:
            raise errors.ExperimentError(
                f"resources.max_slots is {self.max_slots}, too few for trials of {self.slots_per_trial} slots."
            )


class Machines(Protocol):
    """This machine, or the nodes of a cluster. Both methods raise an ExperimentError if the trials cannot run there."""

    def check(self, demand: Demand, folder: Path) -> None:
        """Check that trials can run with the experiment's directory in ``folder``, or its nearest existing parent."""

    def launcher(
        self, directory: ExperimentDirectory, config: dict[str, Any], demand: Demand, warm_start: str | None
    ) -> Launcher:
        """Return the launcher that starts the trials, from the checkpoint ``warm_start`` unless that is None."""
