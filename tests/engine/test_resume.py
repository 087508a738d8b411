"""A run that stops and goes on ends bit-equal to one that never stopped."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage
from tests.trials import CountingCallback, SmallTrial, fit_trial, seed_everything, weights_of

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
) -> Any:
    class Stopping(trial_class):  # type: ignore[misc,valid-type]
        """Notes the sums of all validation batches, whose order shows."""

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.sums: list[float] = []

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            stops = {} if stop_after is None else {"stop": StopAfter(self.context, stop_after)}
            return {**super().build_callbacks(), **stops}

        def evaluate_batch(self, batch: Any) -> dict[str, Any]:
            self.sums.append(float(batch[0].sum()))
            return super().evaluate_batch(batch)

    seed_everything(seed)
    periods = {"reporting_period": pytorch.Batch(1), "validation_period": pytorch.Batch(5)}
    return fit_trial(
        Stopping,
        aggregation_frequency=aggregation_frequency,
        max_length=pytorch.Batch(max_length),
        checkpoint_storage=storage,
        **{**periods, **fit},
    )


def only_checkpoint(storage: Path) -> str:
    (checkpoint,) = CheckpointStorage(storage).list_ids()
    return checkpoint


def assert_same_state(one: SmallTrial, other: SmallTrial) -> None:
    assert torch.equal(weights_of(one), weights_of(other))
    for mine, theirs in zip(one.context.optimizers, other.context.optimizers, strict=True):
        assert str(mine.state_dict()) == str(theirs.state_dict())
    assert one.counter.epochs == other.counter.epochs


class ValidatingAtRandom(SmallTrial):
    """Validates in an order that a generator of the loader's own determines."""

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        data = super().build_validation_data_loader().dataset
        return pytorch.DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))


class SharingGenerator(SmallTrial):
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


class TellingTheEpoch(SmallTrial):
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


class WithWorkers(SmallTrial):
    num_workers = 2


class LivingOn(SmallTrial):
    """Its workers draw their seed from the random state of the training at the first validation only."""

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        data = super().build_validation_data_loader().dataset
        return pytorch.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)


class OneLater(pytorch.DataLoader):
    def get_data_loader(self, repeat: bool = False, skip: int = 0, **shares: Any) -> Any:
        return super().get_data_loader(repeat, skip + 1, **shares)


class OwnLoader(SmallTrial):
    def build_training_data_loader(self) -> pytorch.DataLoader:
        return OneLater(super().build_training_data_loader().dataset, batch_size=8, shuffle=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Trials that were never stopped, by their class and aggregation frequency."""

    @functools.cache
    def train_straight(trial_class: type[SmallTrial] = SmallTrial, aggregation_frequency: int = 1) -> Any:
        storage = tmp_path_factory.mktemp("straight")
        return train(storage, trial_class, aggregation_frequency=aggregation_frequency)

    return train_straight


def cases(trial_class: type[SmallTrial], stops: list[int], lengths: Sequence[int] = (), every: int = 1) -> list[Any]:
    parts = [*({"stop_after": stop} for stop in stops), *({"max_length": length} for length in lengths)]
    return [pytest.param(trial_class, part, every, id=f"{trial_class.__name__} {part} {every}") for part in parts]


@pytest.mark.parametrize(
    ("trial_class", "part", "aggregation_frequency"),
    [
        *cases(SmallTrial, [*range(1, LENGTH, 2)], [3, 5, 7, 16]),
        *cases(SmallTrial, [3, 6, 13, 14], every=2),
        *cases(SmallTrial, [3, 6, 13, 14], every=5),
        *cases(WithWorkers, [2, 7, 13]),
        *cases(LivingOn, [7], [3, 7]),
        *cases(OwnLoader, [3, 16]),
        *cases(ValidatingAtRandom, [7], [8, 10]),
        *cases(SharingGenerator, [7], [8, 10]),
        *cases(TellingTheEpoch, [7], [8, 10]),
    ],
)
def test_resume(
    trial_class: type[SmallTrial],
    part: dict[str, int],
    aggregation_frequency: int,
    straight: Callable[..., Any],
    tmp_path: Path,
) -> None:
    train(tmp_path, trial_class, aggregation_frequency=aggregation_frequency, **part)
    latest = only_checkpoint(tmp_path)
    resumed = train(
        tmp_path, trial_class, aggregation_frequency=aggregation_frequency, latest_checkpoint=latest, seed=99
    )
    expected = straight(trial_class, aggregation_frequency)
    assert_same_state(resumed, expected)
    assert resumed.sums == expected.sums[-len(resumed.sums) :]


def test_several_resumes(straight: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = None
    for leg, stop_after in enumerate((4, 9, 10, 18, LENGTH)):
        storage = tmp_path / f"leg{leg}"
        resumed = train(storage, stop_after=stop_after, latest_checkpoint=checkpoint, seed=3 + leg)
        checkpoint = storage / only_checkpoint(storage)
    assert_same_state(resumed, straight())


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
    resumed = train(tmp_path, Recording, latest_checkpoint=checkpoint)
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
        periods = {"max_length": pytorch.Batch(length), "validation_period": pytorch.Batch(2)}
        fit_trial(
            Falling,
            exp_conf={"searcher": searcher},
            checkpoint_policy="best",
            checkpoint_storage=tmp_path,
            **periods,
            **fit,
        )

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


def test_a_callback_adapts_a_checkpoint(straight: Callable[..., Any], tmp_path: Path) -> None:
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

    train(tmp_path, stop_after=5)
    resumed = train(tmp_path, Renamed, latest_checkpoint=only_checkpoint(tmp_path))
    assert torch.equal(resumed.head.weight, straight().head.weight)


def test_missing_callback_state_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Renamed(SmallTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"renamed": self.counter}

    train(tmp_path, stop_after=2)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, Renamed, latest_checkpoint=only_checkpoint(tmp_path))
    assert "no state for callback 'renamed'" in caplog.text
