"""``EstimatorModule``: an Estimator trial as a ``LightningModule``."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from typing import Any

import torch

from det_lightning import errors
from det_lightning.adapters.module import TrialModule
from det_lightning.estimator._adapter import EstimatorAdapter, adapt_class
from det_lightning.estimator._trial import EstimatorTrial

# The key of TensorFlow's files in a Lightning checkpoint.
_FILES = "estimator_files"


class EstimatorModule(TrialModule):
    """An Estimator trial as a ``LightningModule``: fit, validate and log it like any other.

    TensorFlow trains and evaluates; the schedule, loggers, callbacks and checkpoints work as for any trial.

    Args:
        trial: a subclass of ``EstimatorTrial``.
        hparams: hyperparameters for the trial's context.
        **options: the other arguments of ``TrialModule``, except ``trial_kwargs`` and ``context``.

    Raises:
        TypeError: ``trial`` is not a subclass of ``EstimatorTrial``.
    """

    def __init__(self, trial: type[EstimatorTrial], hparams: dict[str, Any] | None = None, **options: Any) -> None:
        if not (isinstance(trial, type) and issubclass(trial, EstimatorTrial)):
            raise TypeError(
                f"EstimatorModule takes a subclass of det_lightning.estimator.EstimatorTrial; got {trial!r}."
            )
        super().__init__(adapt_class(trial), hparams, **options)
        self._validates_one_batch = options.get("test_mode") == 1
        self._final_files: dict[str, torch.Tensor] = {}
        self._unpacked: tempfile.TemporaryDirectory[str] | None = None

    def _adapter(self) -> EstimatorAdapter:
        adapter, _ = self.require_built_trial()
        assert isinstance(adapter, EstimatorAdapter)
        return adapter

    def build_trial(self) -> None:
        """Build the trial for a call of the trainer, unless built already."""
        super().build_trial()
        self._adapter().single_batch = self._validates_one_batch

    def on_train_end(self) -> None:
        """Keep TensorFlow's files for checkpoints saved after the run."""
        self._final_files = self._read_files()

    def _read_files(self) -> dict[str, torch.Tensor]:
        """Return the non-empty files of a checkpoint by name, as byte tensors; empty on all ranks but the chief."""
        directory = self._adapter().collect_files()
        if directory is None:
            return {}
        paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.stat().st_size]
        files = {path.relative_to(directory).as_posix(): bytearray(path.read_bytes()) for path in paths}
        shutil.rmtree(directory)
        return {name: torch.frombuffer(content, dtype=torch.uint8) for name, content in files.items()}

    def add_trial(self, checkpoint: dict[str, Any]) -> None:
        """Add the trial's part to a checkpoint, with TensorFlow's files as byte tensors by name."""
        super().add_trial(checkpoint)
        checkpoint[_FILES] = self._read_files() if self._adapter().is_training else self._final_files

    def take_trial(self, checkpoint: dict[str, Any]) -> None:
        """Keep the trial's part of a checkpoint, and TensorFlow's files, until the run begins.

        Raise an UnsafeCheckpointError if the name of a file leads out of the checkpoint.
        """
        files: dict[str, torch.Tensor] | None = checkpoint.pop(_FILES, None)
        super().take_trial(checkpoint)
        if files is None or self.resume_content is None:
            return
        self._unpacked = tempfile.TemporaryDirectory(prefix="det_lightning-estimator-")
        directory = pathlib.Path(self._unpacked.name).resolve()
        for name, content in files.items():
            path = (directory / name).resolve()
            if directory not in path.parents:
                raise errors.UnsafeCheckpointError(
                    f"The checkpoint holds a file whose name leads out of the checkpoint: {name!r}."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.numpy().tobytes())
        self.resume_content.directory = directory
