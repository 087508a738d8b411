"""What a run leaves behind besides its weights: traces, TensorBoard files, the paths of its checkpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from det_lightning import core, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.tensorboard.metric_writers.pytorch import TorchWriter
from tests.lightning import fit
from tests.trials import SmallTrial, fit_trial


def fit_for(batches: int, trial_class: type[SmallTrial] = SmallTrial, init: Any = None, **arguments: Any) -> Any:
    """Train a number of batches, with more arguments for ``init`` and ``fit``; return the trainer."""
    with pytorch.init(**(init or {"enable_tensorboard_logging": False})) as context:
        trainer = pytorch.Trainer(trial_class(context), context, enable_progress_bar=False)
        trainer.fit(max_length=pytorch.Batch(batches), **{"checkpoint_storage": "storage", **arguments})
    return trainer


class CountingTrial(SmallTrial, pytorch.PyTorchCallback):
    """Counts its batches by a metric, and is its own callback."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.batches = context.wrap_reducer(torchmetrics.SumMetric(), name="batches")
        self.validated: list[int] = []

    def loss(self, batch: Any) -> torch.Tensor:
        self.batches.update(1)
        return super().loss(batch)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"itself": self}

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.validated.append(int(metrics["batches"]))


def test_torchmetrics_reset_per_workload() -> None:
    assert fit_trial(CountingTrial, validation_period=pytorch.Batch(2)).validated == [4, 4]


def test_profiler_sees_every_batch(tmp_path: Path) -> None:
    class Profiled(SmallTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            cpu = torch.profiler.ProfilerActivity.CPU
            context.set_profiler(activities=[cpu], schedule=torch.profiler.schedule(wait=1, warmup=1, active=2))

    fit_for(9, Profiled, {"tensorboard_path": tmp_path, "enable_tensorboard_logging": False})
    assert len(list(tmp_path.glob("*.pt.trace.json"))) == 2


def test_tensorboard_takes_a_directory(tmp_path: Path) -> None:
    fit_for(5, init={"tensorboard_path": tmp_path})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("Determined/loss")] == [0, 1, 2, 3, 4]
    assert [event.step for event in events.Scalars("Determined/validation_loss")] == [5]


class WritingTrial(SmallTrial):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        with pytest.warns(FutureWarning, match="TorchWriter is deprecated"):
            self.writer = TorchWriter()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.writer.writer.add_scalar("by the trial", batch_idx, batch_idx)
        self.writer.add_scalar("by the trial, too", batch_idx, batch_idx)
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_torch_writer_writes_to_the_run(tmp_path: Path) -> None:
    fit_for(3, WritingTrial, {"tensorboard_path": tmp_path}, reporting_period=pytorch.Batch(1))
    # TensorBoard shows a directory as a run, and follows only its latest file.
    assert not Path("runs").exists()
    (file,) = tmp_path.glob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    assert {"by the trial", "by the trial, too", "Determined/loss"} <= {*events.Tags()["scalars"]}
    assert [event.value for event in events.Scalars("by the trial")] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:TorchWriter is deprecated")
def test_torch_writer_of_a_core_script_shares_its_file() -> None:
    with core.init(checkpoint_storage="storage") as context:
        TorchWriter().add_scalar("by the script", 1.5, 1)
        context.train.report_training_metrics(1, {"loss": 1.0})
    (file,) = Path("runs").rglob("events.out.tfevents.*")
    assert sorted(EventAccumulator(str(file)).Reload().Tags()["scalars"]) == ["Determined/loss", "by the script"]


@pytest.mark.slow
def test_torch_writer_without_a_run_writes_to_runs() -> None:
    code = (
        "from pathlib import Path\n"
        "from det_lightning.tensorboard.metric_writers.pytorch import TorchWriter\n"
        "writer = TorchWriter()\n"
        "print(Path('runs').exists())\n"
        "writer.add_scalar('alone', 1.5, 1)\n"
        "writer.flush()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    (file,) = Path("runs").rglob("events.out.tfevents.*")
    assert EventAccumulator(str(file)).Reload().Tags()["scalars"] == ["alone"]


class GivenQuality(SmallTrial):
    """Validates with values that are given."""

    evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.values = iter(context.get_hparam("values"))

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"quality": next(self.values)}


def test_trainer_knows_its_checkpoints() -> None:
    configured = {"hparams": {"values": [3.0, 1.0, 2.0]}, "exp_conf": {"searcher": {"metric": "quality"}}}
    checkpoints = fit_for(6, GivenQuality, configured, validation_period=pytorch.Batch(2)).checkpoints
    paths = checkpoints.best_checkpoint_path, checkpoints.last_checkpoint_path
    assert [load_checkpoint(path).trial_state.batches_trained for path in paths] == [4, 6]
    assert checkpoints.best_value == 1.0


def test_best_policy_looks_elsewhere(tmp_path: Path) -> None:
    elsewhere = iter([None, 0.5, 4.0, 0.1]).__next__
    checkpoints = DeterminedCheckpoint(tmp_path, metric="quality", code_dir=tmp_path, best_elsewhere=elsewhere)
    periods: dict[str, Any] = {"max_length": pytorch.Batch(8), "validation_period": pytorch.Batch(2)}
    fit(TrialModule(GivenQuality, hparams={"values": [3.0, 1.0, 0.4, 0.2]}, **periods), callbacks=[checkpoints])
    storage = CheckpointStorage(tmp_path)
    assert sorted(storage.info(id_).metadata["steps_completed"] for id_ in storage.list_ids()) == [2, 6, 8]
    assert checkpoints.best_value == 0.1
