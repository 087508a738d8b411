"""What is wrong is named, with the value seen and the way out, and earlier checkpoints stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.errors import InvalidHP, ShouldExit
from tests.lightning import pl, trainer
from tests.trials import SmallTrial, fit_trial, make_data


class NoModel(SmallTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.models.clear()


class NothingWrapped(NoModel):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.optimizers.clear()
        context.lr_schedulers.clear()


class NoEvaluation(SmallTrial):
    evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch


class TwoEvaluations(SmallTrial):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {}


class PlainLoader(SmallTrial):
    def build_training_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(make_data(), batch_size=8)


class RunsDry(PlainLoader):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()


class NoData(SmallTrial):
    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.Subset(make_data(), range(3)), batch_size=8, drop_last=True)


class NoValidationData(SmallTrial):
    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.Subset(make_data(), []), batch_size=8)


class ReturnsNone(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        super().train_batch(batch, epoch_idx, batch_idx)


class ChangingMetrics(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        super().train_batch(batch, epoch_idx, batch_idx)
        return {"loss": 1.0} if batch_idx != 2 else {"los": 1.0}


class ChangingValidationMetrics(SmallTrial):
    def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
        return {"a": 1.0} if batch_idx < 2 else {"b": 1.0}


class ValidationOfNone(SmallTrial):
    def evaluate_batch(self, batch: Any) -> Any:
        return None


class ReducersOfOthers(SmallTrial):
    def evaluation_reducer(self) -> Any:
        return {"accuracy": pytorch.Reducer.AVG}


class NoCallback(SmallTrial):
    def build_callbacks(self) -> Any:
        return {"mine": object()}


class UnwrappedOptimizer(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.context.step_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.1))


class OtherArguments(SmallTrial):
    def train_batch(self, batch: Any, epoch: int, step: int) -> Any:
        return {"loss": 1.0}


class EvaluatesOtherArguments(SmallTrial):
    def evaluate_batch(self, batch: Any, index: int) -> Any:
        return {"validation_loss": 1.0}


class EvaluatesOtherData(SmallTrial):
    evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, loader: Any) -> Any:
        return {"validation_loss": 1.0}


class ClipsByNumber(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.context.step_optimizer(self.sgd, clip_grads=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trial_class", "error", "message"),
    [
        (NoModel, errors.InvalidExperimentException, "NoModel has no wrapped model; pass .*wrap_model"),
        (NothingWrapped, errors.InvalidExperimentException, "no wrapped model;.*no wrapped optimizer;"),
        (NoEvaluation, errors.InvalidExperimentException, "it overrides neither"),
        (TwoEvaluations, errors.InvalidExperimentException, "overrides evaluate_batch and evaluate_full_dataset"),
        (PlainLoader, RuntimeError, r"build_training_data_loader\(\) returned a torch.*disable_dataset_repro"),
        (RunsDry, RuntimeError, "training loader ended after 7 batches.*RepeatBatchSampler"),
        (NoData, RuntimeError, "training loader is empty"),
        (NoValidationData, RuntimeError, "validation loader is empty"),
        (ReturnsNone, TypeError, r"ReturnsNone.train_batch\(\) must return .*got None for batch 0"),
        (
            ChangingMetrics,
            ValueError,
            r"got \['los'\] for batch 2 of the workload, and \['loss'\] for the batches before",
        ),
        (
            ChangingValidationMetrics,
            ValueError,
            r"got \['b'\] for validation batch 2, and \['a'\] for the batches before",
        ),
        (ValidationOfNone, TypeError, r"evaluate_batch\(\) must return a dict .*got None"),
        (ReducersOfOthers, errors.InvalidExperimentException, r"reducers for \['accuracy'\].*\['validation_loss'\]"),
        (NoCallback, TypeError, r"build_callbacks\(\) must return PyTorchCallback .*'mine'"),
        (UnwrappedOptimizer, errors.InvalidExperimentException, "got a SGD that was not wrapped"),
        (
            OtherArguments,
            errors.InvalidExperimentException,
            r"train_batch\(batch.*epoch.*step.*cannot be called.*'epoch'.*by name, as batch, epoch_idx, batch_idx",
        ),
        (EvaluatesOtherArguments, errors.InvalidExperimentException, "evaluate_batch.*by name, as batch, batch_idx"),
        (EvaluatesOtherData, errors.InvalidExperimentException, "evaluate_full_dataset.*by name, as data_loader"),
        (ClipsByNumber, TypeError, r"clip_grads=\.\.\.\) takes a function of the parameters; got 1.0.*clip_grad_norm_"),
    ],
)
def test_untrainable_trials_are_refused(
    trial_class: type[SmallTrial], error: type[BaseException], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit_trial(trial_class, max_length=pytorch.Batch(20))
    assert CheckpointStorage("storage").list_ids() == []


class SeesEachBatch(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        """Make a Lightning step hold a single batch."""


def test_a_dry_loader_is_refused_batch_by_batch() -> None:
    with pytest.raises(RuntimeError, match="loader ended after 7 batches"):
        fit_trial(RunsDry, [SeesEachBatch()], max_length=pytorch.Batch(20))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_length": None}, ValueError, r"fit\(\) needs max_length"),
        ({"max_length": 100}, TypeError, r"max_length must be Batch\(int\) or Epoch\(int\); got 100"),
        ({"max_length": pytorch.Batch([1, 2])}, TypeError, r"got Batch\(\[1, 2\]\)"),
        ({"validation_period": 5}, TypeError, "validation_period must be a Batch or an Epoch.*got 5 of type int"),
        ({"checkpoint_period": "daily"}, TypeError, "checkpoint_period must be .*got 'daily'"),
        ({"reporting_period": 0.5}, TypeError, "reporting_period must be .*got 0.5"),
        ({"validation_period": pytorch.Batch(0.5)}, TypeError, r"whole numbers .*got Batch\(0.5\)"),  # type: ignore[arg-type]
        ({"checkpoint_policy": "sometimes"}, ValueError, "one of best, all, none; got 'sometimes'"),
        ({"latest_checkpoint": "no-such-id"}, errors.CheckpointNotFound, "no checkpoint 'no-such-id'"),
        ({"checkpoint_storage": "nowhere://x"}, errors.StorageError, "'nowhere://x' cannot be opened.*s3://bucket"),
    ],
)
def test_unusable_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit_trial(SmallTrial, **arguments)


class SpecialSignatures(SmallTrial):
    @torch.enable_grad()
    def train_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return super().train_batch(batch, *args, **kwargs)

    @torch.no_grad()
    def evaluate_batch(self, batch: Any, *, index: int = 0) -> Any:
        return super().evaluate_batch(batch)


def test_methods_may_be_wrapped() -> None:
    assert fit_trial(SpecialSignatures).context.optimizer_steps == 8


def test_clip_grads_is_checked_at_once() -> None:
    with pytest.raises(TypeError, match="clip_grads"):
        fit_trial(ClipsByNumber, aggregation_frequency=100)


class NeverBegins(SmallTrial):
    def build_training_data_loader(self) -> pytorch.DataLoader:
        raise AssertionError("data are built")


@pytest.mark.parametrize("api", ["determined", "lightning"])
@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("a_file", "a_file is a file, and no checkpoints can be written to it: a storage is a directory, or a URL"),
        ("a_file/below", "trying to write to .*a_file/below"),
        ("/proc/checkpoints", "trying to write to /proc/checkpoints"),
    ],
)
def test_a_storage_is_checked_before_the_data(storage: str, message: str, api: str) -> None:
    Path("a_file").touch()
    with pytest.raises(errors.StorageError, match=message):
        if api == "determined":
            fit_trial(NeverBegins, checkpoint_storage=storage)
        else:
            trainer([DeterminedCheckpoint(storage, policy="none")]).fit(TrialModule(NeverBegins))


@pytest.mark.parametrize("async_write", [False, True])
def test_without_that_metric_training_is_saved(async_write: bool, tmp_path: Path) -> None:
    checkpoints = DeterminedCheckpoint(tmp_path, metric="accuracy", async_write=async_write)
    with pytest.raises(ValueError, match=r"The training so far is saved in checkpoint [0-9a-f-]{36}\.") as raised:
        fit_trial(max_length=pytorch.Batch(9), validation_period=pytorch.Batch(5), checkpoints=checkpoints)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    assert checkpoint in str(raised.value)
    assert CheckpointStorage(tmp_path).read_metadata(checkpoint)["steps_completed"] == 5


def test_a_resume_without_that_metric_fails_too(tmp_path: Path) -> None:
    for latest in (None, "last"):
        with pytest.raises(ValueError, match=r"compares the validation metric 'accuracy'.*\['batches', 'epochs', 'v"):
            fit_trial(checkpoints=DeterminedCheckpoint(tmp_path, metric="accuracy"), latest_checkpoint=latest)


def test_flags_of_fit_are_not_taken() -> None:
    with (
        pytorch.init(enable_tensorboard_logging=False) as context,
        pytest.raises(errors.UnsupportedTrainerFlags, match="got max_epochs, which"),
    ):
        pytorch.Trainer(SmallTrial(context), context, max_epochs=3).fit(max_length=pytorch.Batch(2))


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
    class DiskFull(SmallTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            class Fails(pytorch.PyTorchCallback):
                def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
                    if CheckpointStorage(tmp_path).list_ids():
                        raise OSError(28, "No space left on device")

            return {"fails": Fails()}

    with pytest.raises(OSError, match="No space left"):
        fit_trial(DiskFull, checkpoint_storage=tmp_path, checkpoint_period=pytorch.Batch(2))
    assert [p.name for p in tmp_path.iterdir()] == CheckpointStorage(tmp_path).list_ids()
    assert len(CheckpointStorage(tmp_path).list_ids()) == 1


@pytest.mark.parametrize(
    ("exception", "raised", "checkpoints"),
    [(InvalidHP("lr"), True, 1), (ShouldExit(), False, 1), (ShouldExit(skip_exit_checkpoint=True), False, 0)],
)
def test_exceptions_of_the_trial(exception: Exception, raised: bool, checkpoints: int, tmp_path: Path) -> None:
    class GivesUp(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise exception
            return super().train_batch(batch, epoch_idx, batch_idx)

    if raised:
        with pytest.raises(SystemExit) as ended:
            fit_trial(GivesUp, checkpoint_storage=tmp_path, max_length=pytorch.Batch(9))
        assert ended.value.code == 0
    else:
        fit_trial(GivesUp, checkpoint_storage=tmp_path, max_length=pytorch.Batch(9))
    assert len(CheckpointStorage(tmp_path).list_ids()) == checkpoints


@pytest.mark.parametrize("method", ["train_batch", "evaluate_batch", "evaluation_reducer"])
def test_stop_iteration_of_a_trial_is_an_error(method: str) -> None:
    exhausted: Any = type("Exhausted", (SmallTrial,), {method: lambda self, *args, **kwargs: next(iter(()))})
    if method == "evaluate_batch":
        exhausted.evaluate_batch = lambda self, batch: next(iter(()))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        fit_trial(exhausted)


def test_unknown_validation_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Numbers(SmallTrial):
        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(make_data(), batch_size=8, collate_fn=len)

    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="batch of type int is unknown; override get_batch_length"):
        fit_trial(Numbers)
