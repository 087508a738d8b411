"""The files of a script that uses the Core API, other than its checkpoints."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from det_lightning.core._task import TrialTask, as_json


class RunFiles:
    """Where a script's TensorBoard files, metadata and status are.

    In a trial of an experiment that is the trial's directory; otherwise a new directory below ``runs/``, which is
    created when something is written.
    """

    def __init__(self, task: TrialTask | None) -> None:
        self._task = task

    @functools.cached_property
    def directory(self) -> Path:
        """The directory of the files."""
        if self._task is not None:
            return self._task.directory
        from det_lightning.core._tensorboard import default_directory  # not needed in a trial of an experiment

        return default_directory()

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard files."""
        return self.directory if self._task is None else self._task.tensorboard_path

    @property
    def metadata(self) -> Path:
        """The file with the metadata that the script has set."""
        return self.directory / "metadata.json"

    @property
    def status(self) -> Path:
        """The file with the latest status."""
        return self.directory / "status.json"

    def update_status(self, **entries: Any) -> None:
        """Write entries of the status, and keep the others."""
        self.write_json(self.status, {**self.read_json(self.status), **entries})

    def read_json(self, file: Path) -> dict[str, Any]:
        """Return the content of one of the files, or an empty dict if it does not exist."""
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return content

    def write_json(self, file: Path, content: dict[str, Any]) -> None:
        """Replace one of the files."""
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps(as_json(content), indent=1), encoding="utf-8")
        draft.replace(file)
