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
from tests.trials import SAMPLES, CountingCallback, SmallTrial, fit_trial, make_data, seed_everything, weights_of

# Each test trains up to the end more than once: little alone, much together.
pytestmark = pytest.mark.slow

LENGTH = 24


def train(
    storage: Path,
    trial_class: type[SmallTrial] = SmallTrial,
    stop_after: int = LENGTH + 1,
    max_length: int = LENGTH,
    seed: int = 3,
    **arguments: Any,
) -> Any:
    """Train a trial, which is a callback as well, asking for the end at a boundary after ``stop_after`` batches."""

    class Stopping(trial_class, pytorch.PyTorchCallback):  # type: ignore[misc,valid-type]
        """Notes the sums of all validation batches, whose order shows."""

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.sums: list[float] = []

        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {**super().build_callbacks(), "itself": self}

        def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[Any]) -> None:
            self.context.set_stop_requested(avg_metrics["batches"] >= stop_after)

        def evaluate_batch(self, batch: Any) -> dict[str, Any]:
            self.sums.append(float(batch[0].sum()))
            return super().evaluate_batch(batch)

    seed_everything(seed)
    arguments = {"reporting_period": pytorch.Batch(1), "validation_period": pytorch.Batch(5), **arguments}
    return fit_trial(Stopping, max_length=pytorch.Batch(max_length), checkpoint_storage=storage, **arguments)


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
        return pytorch.DataLoader(make_data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))


class SharingGenerator(SmallTrial):
    """Both loaders draw from one generator, as torch's notes on reproducibility have it."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.generator = torch.Generator().manual_seed(1)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=5, shuffle=True, generator=self.generator)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=8, generator=self.generator)


class ByEpoch(torch.utils.data.Sampler[int]):
    """Shuffles by the number of the epoch, which it must be told, like torch's DistributedSampler."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return self.size


class ChangingByEpoch(SmallTrial):
    """Tells the sampler the next epoch while the current one is trained, and freezes a model in the second epoch."""

    def build_training_data_loader(self) -> pytorch.DataLoader:
        self.sampler = ByEpoch(SAMPLES)
        return pytorch.DataLoader(make_data(), batch_size=5, sampler=self.sampler)

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.sampler.epoch = epoch_idx + 1
        self.body.requires_grad_(epoch_idx != 1)


class WithWorkers(SmallTrial):
    num_workers = 2


class LivingOn(SmallTrial):
    """Its workers draw their seed from the random state of the training at the first validation only."""

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=4, num_workers=1, persistent_workers=True)


class InDoublePrecision(SmallTrial):
    """NAdam keeps a product in single precision, also for weights in double precision."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        for model in context.models:
            model.double()
        self.adam = context.wrap_optimizer(torch.optim.NAdam(self.body.parameters()))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss([values.double() for values in batch])


class OneLater(pytorch.DataLoader):
    def get_data_loader(self, repeat: bool = False, skip: int = 0, **shares: Any) -> Any:
        return super().get_data_loader(repeat, skip + 1, **shares)


class OwnLoader(SmallTrial):
    def build_training_data_loader(self) -> pytorch.DataLoader:
        return OneLater(make_data(), batch_size=8, shuffle=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Trials that were never stopped, by their class and aggregation frequency."""

    @functools.cache
    def train_straight(trial_class: type[SmallTrial] = SmallTrial, every: int = 1) -> Any:
        return train(tmp_path_factory.mktemp("straight"), trial_class, aggregation_frequency=every)

    return train_straight


def cases(trial_class: type[SmallTrial], stops: list[int], lengths: Sequence[int] = (), every: int = 1) -> list[Any]:
    parts = [*({"stop_after": stop} for stop in stops), *({"max_length": length} for length in lengths)]
    return [pytest.param(trial_class, part, every, id=f"{trial_class.__name__} {part} {every}") for part in parts]


@pytest.mark.parametrize(
    ("trial_class", "part", "every"),
    [
        *cases(SmallTrial, [*range(1, LENGTH, 2)], [3, 5, 7, 16]),
        *cases(SmallTrial, [3, 6, 13, 14], every=2),
        *cases(SmallTrial, [3, 6, 13, 14], every=5),
        *cases(WithWorkers, [2, 7, 13]),
        *cases(LivingOn, [7], [3, 7]),
        *cases(OwnLoader, [3, 16]),
        *cases(InDoublePrecision, [7]),
        *cases(ValidatingAtRandom, [7], [8, 10]),
        *cases(SharingGenerator, [7], [8, 10]),
        *cases(ChangingByEpoch, [7], [8, 10, 13]),
    ],
)
def test_resumed_run_ends_as_a_straight_one(
    trial_class: type[SmallTrial], part: dict[str, Any], every: int, straight: Callable[..., Any], tmp_path: Path
) -> None:
    train(tmp_path, trial_class, aggregation_frequency=every, **part)
    latest = only_checkpoint(tmp_path)
    resumed = train(tmp_path, trial_class, aggregation_frequency=every, latest_checkpoint=latest, seed=99)
    expected = straight(trial_class, every)
    assert_same_state(resumed, expected)
    assert resumed.sums == expected.sums[-len(resumed.sums) :]


def test_run_resumed_several_times_ends_as_a_straight_one(straight: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = None
    for leg, stop_after in enumerate((4, 9, 10, 18, LENGTH)):
        storage = tmp_path / f"leg{leg}"
        resumed = train(storage, stop_after=stop_after, latest_checkpoint=checkpoint, seed=3 + leg)
        checkpoint = storage / only_checkpoint(storage)
    assert_same_state(resumed, straight())


def test_resume_with_other_validation_samplers_works(tmp_path: Path) -> None:
    train(tmp_path, ValidatingAtRandom, stop_after=7)
    train(tmp_path, latest_checkpoint=only_checkpoint(tmp_path))


def test_the_trial_sees_where_it_resumes(tmp_path: Path) -> None:
    class Recording(SmallTrial):
        seen: tuple[Any, ...] = ()

        def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
            self.seen += (first_batch_idx, checkpoint_uuid)

        def build_training_data_loader(self) -> pytorch.DataLoader:
            self.seen += (self.context.get_initial_batch(),)
            return super().build_training_data_loader()

    train(tmp_path, Recording, stop_after=9)
    checkpoint = only_checkpoint(tmp_path)
    assert train(tmp_path, Recording, latest_checkpoint=checkpoint).seen == (9, checkpoint, 9)


def test_a_complete_run_does_nothing(tmp_path: Path) -> None:
    done = train(tmp_path)
    assert_same_state(train(tmp_path, latest_checkpoint=only_checkpoint(tmp_path), seed=99), done)
    assert len(CheckpointStorage(tmp_path).list_ids()) == 1


def test_best_spans_resumes(tmp_path: Path) -> None:
    class Falling(SmallTrial):
        values = iter([5.0, 3.0, 4.0, 2.0])

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"quality": next(self.values)}

        evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

    best = {"exp_conf": {"searcher": {"metric": "quality", "smaller_is_better": True}}, "checkpoint_policy": "best"}
    arguments = {**best, "checkpoint_storage": tmp_path, "validation_period": pytorch.Batch(2)}
    fit_trial(Falling, max_length=pytorch.Batch(4), **arguments)  # 5 and 3: both are the best up to then
    assert len(CheckpointStorage(tmp_path).list_ids()) == 2
    fit_trial(Falling, max_length=pytorch.Batch(8), latest_checkpoint="last", **arguments)  # 4 is not, 2 is
    assert len(CheckpointStorage(tmp_path).list_ids()) == 3


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
        def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
            for parts in ("models_state_dict", "optimizers_state_dict", "lr_schedulers_state_dict"):
                checkpoint[parts] = [*reversed(checkpoint[parts])]

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
