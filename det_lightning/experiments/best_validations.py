"""Tells running trials the best validation of each trial of their experiment, for the policy ``best``."""

from __future__ import annotations

from pathlib import Path

from det_lightning.experiments.state import ExperimentState
from det_lightning.files.strict_json import to_json


class BestValidations:
    """Keeps a file, which trials read at each validation, up to date with the best metric of each trial."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._reports: int | None = None

    def publish(self, state: ExperimentState) -> None:
        """Write the file if metrics of a validation were reported since the last call."""
        if state.validation_reports == self._reports:
            return
        best = {trial.trial_id: state.best_of(trial) for trial in state.trials.values()}
        self._file.parent.mkdir(exist_ok=True)
        draft = self._file.with_suffix(".tmp")
        draft.write_text(to_json({trial: value for trial, value in best.items() if value is not None}))
        draft.replace(self._file)
        self._reports = state.validation_reports
