"""A run that stops and goes on ends bit-equal to one that never stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage
from tests.trials import CountingCallback, SmallTrial, seed_everything, weights_of

# Each test trains up to the end more than once: little alone, much together.
pytestmark = pytest.mark.slow

LENGTH = 24


class StopAfter(pytorch.PyTorchCallback):
    """Asks for the end at the first boundary after ``batches`` batches."""

    def __init__(self, context: pytorch.PyTorchTrialContext, batches: int) -> None:
        self.context, self.batches = context, batches

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        if avg_metrics["batches"] >= self.batches:
            self.context.set_stop_requested(True)


def train(
    storage: Path,
    trial_class: type[SmallTrial] = SmallTrial,
    stop_after: int | None = None,
    max_length: int = LENGTH,
    aggregation_frequency: int = 1,
    seed: int = 3,
    **fit: Any,
) -> SmallTrial:
    class Stopping(trial_class):  # type: ignore[misc,valid-type]
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            stops = {} if stop_after is None else {"stop": StopAfter(self.context, stop_after)}
            return {**super().build_callbacks(), **stops}

    seed_everything(seed)
    with pytorch.init(aggregation_frequency=aggregation_frequency, enable_tensorboard_logging=False) as context:
        trial = Stopping(context)
        periods = {"reporting_period": pytorch.Batch(1), "validation_period": pytorch.Batch(5)}
        pytorch.Trainer(trial, context, enable_progress_bar=False).fit(
            max_length=pytorch.Batch(max_length),
            checkpoint_policy="none",
            checkpoint_storage=storage,
            **{**periods, **fit},
        )
    return trial


def only_checkpoint(storage: Path) -> str:
    (checkpoint,) = CheckpointStorage(storage).list_ids()
    return checkpoint


def assert_same_state(one: SmallTrial, other: SmallTrial) -> None:
    assert torch.equal(weights_of(one), weights_of(other))
    for mine, theirs in zip(one.context.optimizers, other.context.optimizers, strict=True):
        assert str(mine.state_dict()) == str(theirs.state_dict())
    assert one.counter.epochs == other.counter.epochs


@pytest.mark.parametrize("stop_after", range(1, LENGTH, 2))
def test_resume_after_a_request_at_any_batch(stop_after: int, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight")
    train(tmp_path / "parts", stop_after=stop_after)
    resumed = train(tmp_path / "parts", latest_checkpoint=only_checkpoint(tmp_path / "parts"), seed=99)
    assert_same_state(resumed, straight)


@pytest.mark.parametrize("stop_after", [3, 5, 7, 16])
def test_resume_after_a_shorter_length(stop_after: int, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight")
    train(tmp_path / "parts", max_length=stop_after)
    resumed = train(tmp_path / "parts", latest_checkpoint=only_checkpoint(tmp_path / "parts"), seed=99)
    assert_same_state(resumed, straight)


@pytest.mark.parametrize("stop_after", [2, 7, 13])
def test_resume_with_loader_workers(stop_after: int, tmp_path: Path) -> None:
    class WithWorkers(SmallTrial):
        num_workers = 2

    straight = train(tmp_path / "straight", WithWorkers)
    train(tmp_path / "parts", WithWorkers, stop_after=stop_after)
    resumed = train(tmp_path / "parts", WithWorkers, latest_checkpoint=only_checkpoint(tmp_path / "parts"), seed=99)
    assert_same_state(resumed, straight)


@pytest.mark.parametrize("part", [{"stop_after": 7}, {"max_length": 3}, {"max_length": 7}], ids=str)
def test_resume_with_persistent_workers(part: dict[str, int], tmp_path: Path) -> None:
    """They draw their seed from the random state of the training at the first validation only."""

    class LivingOn(SmallTrial):
        def build_validation_data_loader(self) -> pytorch.DataLoader:
            data = super().build_validation_data_loader().dataset
            return pytorch.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)

    straight = train(tmp_path / "straight", LivingOn)
    train(tmp_path / "parts", LivingOn, **part)
    resumed = train(tmp_path / "parts", LivingOn, latest_checkpoint=only_checkpoint(tmp_path / "parts"), seed=99)
    assert_same_state(resumed, straight)


@pytest.mark.parametrize("stop_after", [3, 16])
def test_resume_with_a_loader_from_super(stop_after: int, tmp_path: Path) -> None:
    class Later(pytorch.DataLoader):
        def get_data_loader(self, repeat: bool = False, skip: int = 0, **shares: Any) -> Any:
            return super().get_data_loader(repeat, skip + 1, **shares)

    class OwnLoader(SmallTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return Later(super().build_training_data_loader().dataset, batch_size=8, shuffle=True)

    straight = train(tmp_path / "straight", OwnLoader)
    train(tmp_path / "parts", OwnLoader, stop_after=stop_after)
    resumed = train(tmp_path / "parts", OwnLoader, latest_checkpoint=only_checkpoint(tmp_path / "parts"), seed=99)
    assert_same_state(resumed, straight)


@pytest.mark.parametrize("aggregation_frequency", [2, 5])
@pytest.mark.parametrize("stop_after", [3, 6, 13, 14])
def test_resume_within_an_aggregation(stop_after: int, aggregation_frequency: int, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", aggregation_frequency=aggregation_frequency)
    train(tmp_path / "parts", stop_after=stop_after, aggregation_frequency=aggregation_frequency)
    checkpoint = only_checkpoint(tmp_path / "parts")
    resumed = train(
        tmp_path / "parts", latest_checkpoint=checkpoint, aggregation_frequency=aggregation_frequency, seed=99
    )
    assert_same_state(resumed, straight)


def test_several_resumes(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight")
    checkpoint = None
    for leg, stop_after in enumerate((4, 9, 10, 18, LENGTH)):
        storage = tmp_path / f"leg{leg}"
        resumed = train(storage, stop_after=stop_after, latest_checkpoint=checkpoint, seed=3 + leg)
        checkpoint = storage / only_checkpoint(storage)
    assert_same_state(resumed, straight)


def test_resume_with_another_batch_size(tmp_path: Path) -> None:
    """As in Determined, which skips as many batches of the new size as were trained."""

    class OfBatchSize(SmallTrial):
        batch_size = 4

        def build_training_data_loader(self) -> pytorch.DataLoader:
            data = super().build_training_data_loader().dataset
            return pytorch.DataLoader(data, batch_size=self.batch_size, shuffle=True, drop_last=True)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            sizes.append(len(batch[0]))
            return super().train_batch(batch, epoch_idx, batch_idx)

    sizes: list[int] = []
    train(tmp_path, OfBatchSize, stop_after=3)
    OfBatchSize.batch_size = 7
    train(tmp_path, OfBatchSize, latest_checkpoint=only_checkpoint(tmp_path), max_length=9)
    assert sizes == [4] * 3 + [7] * 6


class Noting(SmallTrial):
    """Notes the sums of all validation batches, whose order shows."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.sums: list[float] = []

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.sums.append(float(batch[0].sum()))
        return super().evaluate_batch(batch)


class ValidatingAtRandom(Noting):
    """Validates in an order that a generator of the loader's own determines."""

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        data = super().build_validation_data_loader().dataset
        return pytorch.DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))


class SharingGenerator(Noting):
    """Both loaders draw from one generator, as torch's notes on reproducibility have it."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.generator = torch.Generator().manual_seed(1)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        data = super().build_training_data_loader().dataset
        return pytorch.DataLoader(data, batch_size=5, shuffle=True, generator=self.generator)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        data = super().build_validation_data_loader().dataset
        return pytorch.DataLoader(data, batch_size=8, generator=self.generator)


class ByEpoch(torch.utils.data.Sampler[int]):
    """Shuffles by the number of the epoch, which it must be told, like torch's DistributedSampler."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.size, generator=generator).tolist())

    def __len__(self) -> int:
        return self.size


class TellingTheEpoch(Noting):
    """A callback tells the sampler the next epoch while the current one is trained."""

    def build_training_data_loader(self) -> pytorch.DataLoader:
        data: Any = super().build_training_data_loader().dataset
        self.sampler = ByEpoch(len(data))
        return pytorch.DataLoader(data, batch_size=5, sampler=self.sampler)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        trial = self

        class Tell(pytorch.PyTorchCallback):
            def on_training_epoch_start(self, epoch_idx: int) -> None:
                trial.sampler.epoch = epoch_idx + 1

        return {**super().build_callbacks(), "tell": Tell()}


@pytest.mark.parametrize("part", [{"stop_after": 7}, {"max_length": 8}, {"max_length": 10}], ids=str)
@pytest.mark.parametrize("trial_class", [ValidatingAtRandom, SharingGenerator, TellingTheEpoch])
def test_resume_with_changing_samplers(trial_class: type[Noting], part: dict[str, int], tmp_path: Path) -> None:
    straight: Any = train(tmp_path / "straight", trial_class)
    train(tmp_path / "parts", trial_class, **part)
    checkpoint = only_checkpoint(tmp_path / "parts")
    resumed: Any = train(tmp_path / "parts", trial_class, latest_checkpoint=checkpoint, seed=99)
    assert_same_state(resumed, straight)
    assert resumed.sums == straight.sums[-len(resumed.sums) :]


def test_resume_with_other_validation_samplers(tmp_path: Path) -> None:
    class InOrder(ValidatingAtRandom):
        build_validation_data_loader = SmallTrial.build_validation_data_loader

    train(tmp_path, ValidatingAtRandom, stop_after=7)
    train(tmp_path, InOrder, latest_checkpoint=only_checkpoint(tmp_path))


def test_the_trial_sees_where_it_resumes(tmp_path: Path) -> None:
    class Recording(SmallTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            self.seen: list[Any] = []
            trial = self

            class Note(pytorch.PyTorchCallback):
                def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
                    trial.seen += [first_batch_idx, checkpoint_uuid]

            return {"note": Note()}

        def build_training_data_loader(self) -> pytorch.DataLoader:
            self.seen.append(self.context.get_initial_batch())
            return super().build_training_data_loader()

    train(tmp_path, Recording, stop_after=9)
    checkpoint = only_checkpoint(tmp_path)
    resumed: Any = train(tmp_path, Recording, latest_checkpoint=checkpoint)
    assert resumed.seen == [9, checkpoint, 9]


def test_a_complete_run_does_nothing(tmp_path: Path) -> None:
    done = train(tmp_path)
    again = train(tmp_path, latest_checkpoint=only_checkpoint(tmp_path), seed=99)
    assert_same_state(again, done)
    assert len(CheckpointStorage(tmp_path).list_ids()) == 1


def test_best_spans_resumes(tmp_path: Path) -> None:
    class Falling(SmallTrial):
        values = iter([5.0, 3.0, 4.0, 2.0])

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"quality": next(self.values)}

        evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

    def run(length: int, **fit: Any) -> None:
        searcher = {"metric": "quality", "smaller_is_better": True}
        with pytorch.init(exp_conf={"searcher": searcher}, enable_tensorboard_logging=False) as context:
            trainer = pytorch.Trainer(Falling(context), context, enable_progress_bar=False)
            period = pytorch.Batch(2)
            trainer.fit(max_length=pytorch.Batch(length), validation_period=period, checkpoint_storage=tmp_path, **fit)

    storage = CheckpointStorage(tmp_path)
    run(4)  # 5 and 3: both are the best up to then
    assert len(storage.list_ids()) == 2
    latest = max(storage.list_ids(), key=lambda name: (tmp_path / name).stat().st_mtime_ns)
    run(8, latest_checkpoint=latest)  # 4 is not, 2 is
    assert len(storage.list_ids()) == 3


def test_other_trials_checkpoints_are_explained(tmp_path: Path) -> None:
    class Wider(SmallTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.models[1] = torch.nn.Linear(9, 1)

    train(tmp_path, stop_after=2)
    with pytest.raises(errors.InvalidCheckpointException, match=r"does not fit(.|\n)*model 1 \(Linear\): (.|\n)*size"):
        train(tmp_path, Wider, latest_checkpoint=only_checkpoint(tmp_path))


def test_unwrapped_parts_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class OnlyBody(SmallTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            self.body = context.wrap_model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3)))
            self.head = torch.nn.Linear(8, 1)
            self.adam = context.wrap_optimizer(torch.optim.Adam(self.body.parameters(), lr=0.5))
            self.counter = CountingCallback()

    before = train(tmp_path, stop_after=5)
    with caplog.at_level(logging.WARNING):
        resumed = train(tmp_path, OnlyBody, max_length=5, latest_checkpoint=only_checkpoint(tmp_path))
    assert str(resumed.body.state_dict()) == str(before.body.state_dict())
    assert str(resumed.adam.state_dict()) == str(before.adam.state_dict())
    assert "has 2 model(s), and the trial wraps 1: only the first 1 are loaded" in caplog.text
    assert "has 2 learning rate scheduler(s), and the trial wraps 0: only the first 0 are loaded" in caplog.text


def test_a_callback_adapts_a_checkpoint(tmp_path: Path) -> None:
    class Renamed(SmallTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            class Renames(pytorch.PyTorchCallback):
                def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
                    checkpoint["models_state_dict"] = [*reversed(checkpoint["models_state_dict"])]
                    checkpoint["optimizers_state_dict"] = [*reversed(checkpoint["optimizers_state_dict"])]
                    checkpoint["lr_schedulers_state_dict"] = [*reversed(checkpoint["lr_schedulers_state_dict"])]

            return {**super().build_callbacks(), "renames": Renames()}

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            for wrapped in (context.models, context.optimizers, context.lr_schedulers):
                wrapped.reverse()

    straight: Any = train(tmp_path / "straight")
    train(tmp_path / "parts", stop_after=5)
    resumed: Any = train(tmp_path / "parts", Renamed, latest_checkpoint=only_checkpoint(tmp_path / "parts"))
    assert torch.equal(resumed.head.weight, straight.head.weight)


def test_missing_callback_state_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Renamed(SmallTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"renamed": self.counter}

    train(tmp_path, stop_after=2)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, Renamed, latest_checkpoint=only_checkpoint(tmp_path))
    assert "no state for callback 'renamed'" in caplog.text
