"""Trials of other libraries, which wrap nothing and keep their weights as files of their own in the checkpoints."""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import pytest

from det_lightning import pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.pytorch._pytorch_trial import ExternalStateTrial
from tests.trials import fit_trial


class Counter(ExternalStateTrial):
    """Its only weight is a number, which each batch increments and the file ``number.txt`` keeps."""

    trial_type = "CounterTrial"

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.disable_dataset_reproducibility_checks()
        self.number = 0
        self.began_with: list[Any] = []

    def begin_run(self, files: pathlib.Path | None, batches_trained: int, exact: bool) -> None:
        self.began_with = [batches_trained, exact]
        if files is not None:
            self.number = int((files / "number.txt").read_text())

    def collect_files(self) -> pathlib.Path:
        directory = pathlib.Path(tempfile.mkdtemp())
        (directory / "number.txt").write_text(str(self.number))
        return directory

    def describe_files(self) -> dict[str, str]:
        return {"framework": "counting-1.0", "format": "text"}

    def get_batch_length(self, batch: Any) -> int:
        return 1

    def build_training_data_loader(self) -> Any:
        return [{}] * 1000

    def build_validation_data_loader(self) -> Any:
        return [{}]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.number += 1
        return {"loss": float(self.number)}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"number": self.number}


@pytest.mark.parametrize("async_write", [False, True])
def test_checkpoints_hold_and_describe_files(tmp_path: pathlib.Path, async_write: bool) -> None:
    checkpoints = DeterminedCheckpoint(tmp_path, policy="none", async_write=async_write)
    fit_trial(Counter, max_length=pytorch.Batch(3), checkpoints=checkpoints)
    (file,) = tmp_path.glob("*/number.txt")
    assert file.read_text() == "3"
    metadata, load_data = (json.loads(file.with_name(f"{name}.json").read_text()) for name in ("metadata", "load_data"))
    assert (metadata["framework"], metadata["format"]) == ("counting-1.0", "text")
    assert load_data["trial_type"] == "CounterTrial"
    resumed = fit_trial(Counter, max_length=pytorch.Batch(5), checkpoints=checkpoints, latest_checkpoint="last")
    assert (resumed.began_with, resumed.number) == ([3, True], 5)
