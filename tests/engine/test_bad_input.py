"""What is wrong is named, with the value seen and the way out, and earlier checkpoints stay as they are."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.errors import InvalidHP, ShouldExit
from tests.lightning import trainer
from tests.trials import SmallTrial, failing_at, fit_trial, make_data


def loader_of(samples: int, **arguments: Any) -> Any:
    """Return a method that builds a loader of the first samples of the data."""
    data = torch.utils.data.Subset(make_data(), range(samples))
    return lambda self: pytorch.DataLoader(data, batch_size=8, **arguments)


def build_finite_loader(self: SmallTrial) -> Any:
    self.context.experimental.disable_dataset_reproducibility_checks()
    return torch.utils.data.DataLoader(make_data(), batch_size=8)


def step_unwrapped(self: SmallTrial, batch: Any, epoch_idx: int, batch_idx: int) -> None:
    self.context.step_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.1))


NO_EVALUATION: dict[str, Any] = {"evaluate_batch": pytorch.PyTorchTrial.evaluate_batch}
INVALID = errors.InvalidExperimentException
EMPTY: Any = iter(())


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        (NO_EVALUATION, INVALID, "it overrides neither"),
        ({"build_training_data_loader": loader_of(3, drop_last=True)}, RuntimeError, "training loader is empty"),
        (
            {"build_training_data_loader": build_finite_loader},
            RuntimeError,
            "training loader ended after 7 batches.*RepeatBatchSampler",
        ),
        ({"evaluate_batch": lambda self, batch: None}, TypeError, r"evaluate_batch\(\) must return a dict .*got None"),
        (
            {"train_batch": lambda self, batch, epoch_idx, batch_idx: None},
            TypeError,
            r"Wrong.train_batch\(\) must return .*got None for batch 0",
        ),
        (
            {"train_batch": lambda self, batch, epoch_idx, batch_idx: {"los" if batch_idx == 2 else "loss": 1.0}},
            ValueError,
            r"got \['los'\] for batch 2 of the workload, and \['loss'\] for the batches before",
        ),
        ({"build_callbacks": lambda self: {"mine": object()}}, TypeError, "must return PyTorchCallback .*'mine'"),
        ({"train_batch": step_unwrapped}, INVALID, "got a SGD that was not wrapped"),
        (
            {"train_batch": lambda self, batch, epoch, step: {"loss": 1.0}},
            INVALID,
            r"train_batch\(batch.*epoch.*step.*cannot be called.*'epoch'.*by name, as batch, epoch_idx, batch_idx",
        ),
        ({"evaluate_batch": lambda self, batch, index: {}}, INVALID, "evaluate_batch.*by name, as batch, batch_idx"),
        ({"train_batch": lambda self, batch, epoch_idx, batch_idx: next(EMPTY)}, RuntimeError, "raised StopIteration"),
        ({"evaluate_batch": lambda self, batch: next(EMPTY)}, RuntimeError, "raised StopIteration"),
        ({"evaluation_reducer": lambda self: next(EMPTY)}, RuntimeError, "raised StopIteration"),
        (
            {"build_validation_data_loader": loader_of(50, collate_fn=len)},
            TypeError,
            "batch of type int is unknown; override get_batch_length",
        ),
        (
            {**NO_EVALUATION, "evaluate_full_dataset": lambda self, loader: {}},
            INVALID,
            "evaluate_full_dataset.*by name, as data_loader",
        ),
    ],
)
def test_wrong_methods_are_refused(methods: dict[str, Any], error: type[Exception], message: str) -> None:
    """tests/conformance/test_same_errors.py has the mistakes that Determined names, too."""
    with pytest.raises(error, match=message):
        fit_trial(type("Wrong", (SmallTrial,), methods), max_length=pytorch.Batch(20))
    assert CheckpointStorage("storage").list_ids() == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reporting_period": 0.5}, TypeError, "reporting_period must be .*got 0.5"),
        ({"checkpoint_policy": "sometimes"}, ValueError, "one of best, all, none; got 'sometimes'"),
        ({"latest_checkpoint": "no-such-id"}, errors.CheckpointNotFound, "no checkpoint 'no-such-id'"),
        ({"checkpoint_storage": "nowhere://x"}, errors.StorageError, "'nowhere://x' cannot be opened.*s3://bucket"),
    ],
)
def test_unusable_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit_trial(SmallTrial, **arguments)


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("a_file", "a_file is a file, and no checkpoints can be written to it: a storage is a directory, or a URL"),
        ("a_file/below", "trying to write to .*a_file/below"),
        ("/proc/checkpoints", "trying to write to /proc/checkpoints"),
    ],
)
def test_a_storage_is_checked_before_the_data(storage: str, message: str) -> None:
    class NeverBegins(SmallTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            raise AssertionError("data are built")

    Path("a_file").touch()
    with pytest.raises(errors.StorageError, match=message):
        fit_trial(NeverBegins, checkpoint_storage=storage)
    with pytest.raises(errors.StorageError, match=message):
        trainer([DeterminedCheckpoint(storage, policy="none")]).fit(TrialModule(NeverBegins))


@pytest.mark.parametrize("async_write", [False, True])
def test_without_that_metric_training_is_saved(async_write: bool, tmp_path: Path) -> None:
    checkpoints = DeterminedCheckpoint(tmp_path, metric="accuracy", async_write=async_write)
    missing = r"compares the validation metric 'accuracy'.*\['batches', 'epochs', 'v"
    with pytest.raises(ValueError, match=rf"{missing}.*is saved in checkpoint [0-9a-f-]{{36}}\.") as raised:
        fit_trial(max_length=pytorch.Batch(9), validation_period=pytorch.Batch(5), checkpoints=checkpoints)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    assert checkpoint in str(raised.value)
    assert CheckpointStorage(tmp_path).info(checkpoint).metadata["steps_completed"] == 5
    with pytest.raises(ValueError, match=missing):
        fit_trial(checkpoints=checkpoints, latest_checkpoint="last")


def test_flags_of_fit_are_not_taken() -> None:
    with (
        pytorch.init(enable_tensorboard_logging=False) as context,
        pytest.raises(errors.UnsupportedTrainerFlags, match="got log_every_n_steps, max_epochs, which"),
    ):
        pytorch.Trainer(SmallTrial(context), context, max_epochs=3, log_every_n_steps=5).fit(
            max_length=pytorch.Batch(2)
        )


def test_torn_checkpoints_are_not_taken(tmp_path: Path) -> None:
    fit_trial(checkpoint_storage=tmp_path)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    state = tmp_path / checkpoint / "state_dict.pth"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(errors.IncompleteCheckpointError, match=f"{checkpoint}/state_dict.pth"):
        fit_trial(SmallTrial, checkpoint_storage=tmp_path, latest_checkpoint=checkpoint)
    (tmp_path / checkpoint / "metadata.json").unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match=r"metadata\.json is missing"):
        fit_trial(SmallTrial, checkpoint_storage=tmp_path, latest_checkpoint=str(tmp_path / checkpoint))


def test_a_failing_callback_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    class DiskFull(SmallTrial, pytorch.PyTorchCallback):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"itself": self}

        def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
            if CheckpointStorage(tmp_path).list_ids():
                raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fit_trial(DiskFull, checkpoint_storage=tmp_path, checkpoint_period=pytorch.Batch(2))
    assert [p.name for p in tmp_path.iterdir()] == CheckpointStorage(tmp_path).list_ids()
    assert len(CheckpointStorage(tmp_path).list_ids()) == 1


@pytest.mark.parametrize(
    ("exception", "raised", "checkpoints"),
    [(InvalidHP("lr"), True, 1), (ShouldExit(), False, 1), (ShouldExit(skip_exit_checkpoint=True), False, 0)],
)
def test_exception_that_ends_a_run_saves_first(
    exception: Exception, raised: bool, checkpoints: int, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"^0$") if raised else contextlib.nullcontext():
        fit_trial(failing_at(3, exception), checkpoint_storage=tmp_path, max_length=pytorch.Batch(9))
    assert len(CheckpointStorage(tmp_path).list_ids()) == checkpoints
