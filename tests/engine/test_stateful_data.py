"""Data that know their own position: a resumed run goes on where they stopped, whoever made the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY
from tests.lightning import pl, trainer
from tests.trials import (
    BATCH_SIZE,
    EPOCH_LEN,
    SAMPLES,
    SmallTrial,
    failing_at,
    fit_trial,
    make_data,
    seed_everything,
    weights_of,
)

LENGTH = 2 * EPOCH_LEN + 3


class Positioned:
    """Counts the samples read, and the passes."""

    def __init__(self) -> None:
        self.read = self.passes = 0

    def __len__(self) -> int:
        return SAMPLES

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(1000 * self.passes + self.read))
        self.read += 1
        return inputs, inputs.sum(0, keepdim=True)

    def __iter__(self) -> Iterator[Any]:
        while self.read < SAMPLES:
            yield self.sample()
        self.read, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read, self.passes = state["read"], state["passes"]


class OwnLoader(Positioned):
    def __len__(self) -> int:
        return EPOCH_LEN

    def __iter__(self) -> Iterator[Any]:
        while self.read < EPOCH_LEN:
            yield [part[None] for part in self.sample()]
        self.read, self.passes = 0, self.passes + 1


class Endless(OwnLoader):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from super().__iter__()


class Stream(Positioned, IterableDataset[Any]):
    pass


class Restarting(Stream):
    """Begins the next pass as soon as the last sample is read: a resumed run sees no end of the pass."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.read % SAMPLES, SAMPLES):
            yield self.sample()


class Shuffling(Stream):
    """A stream with a buffer, which it gives away as its state."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            self.buffer.append(sample)
            if len(self.buffer) > 5:
                yield self.buffer.pop(int(torch.randint(len(self.buffer), ())))
        while self.buffer:
            yield self.buffer.pop()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = state["buffer"]


class Noisy(Dataset[Any]):
    """A map-style dataset with a generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.data = make_data()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.data[index]
        return inputs + torch.randn(4, generator=self.generator), targets

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Left(Sampler[int]):
    """Draws what is left of a list."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.seeds = [0]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        if not self.left:
            self.seeds = [self.seeds[0] + 1]
            self.left = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seeds[0])).tolist()
        while self.left:
            yield self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "seeds": self.seeds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.seeds = state["left"], state["seeds"]


def of_torch(dataset: Any, **arguments: Any) -> Any:
    return DataLoader(dataset, batch_size=BATCH_SIZE, **arguments)


def of_torchdata(dataset: Any, **arguments: Any) -> Any:
    return StatefulDataLoader(dataset, batch_size=BATCH_SIZE, **arguments)


def of_determined(dataset: Any, **arguments: Any) -> Any:
    return pytorch.DataLoader(dataset, batch_size=BATCH_SIZE, **arguments)


LOADERS: dict[str, Callable[[], Any]] = {
    "a loader of one's own": OwnLoader,
    "an endless loader": Endless,
    "torchdata": lambda: of_torchdata(make_data(), shuffle=True),
    "torchdata, distributed": lambda: of_torchdata(make_data(), sampler=StatefulDistributedSampler(make_data(), 1, 0)),
    "torchdata, a stream": lambda: of_torchdata(Stream()),
    "torch, a stream": lambda: of_torch(Stream()),
    "torch, a stream that restarts": lambda: of_torch(Restarting()),
    "torch, a buffer": lambda: of_torch(Shuffling()),
    "torch, a sampler": lambda: of_torch(make_data(), sampler=Left()),
    "Determined, a dataset": lambda: of_determined(Noisy(), shuffle=True),
    "Determined, a sampler": lambda: of_determined(Noisy(), sampler=Left()),
    "torchdata, workers": lambda: of_torchdata(make_data(), shuffle=True, num_workers=2, persistent_workers=True),
}
STOPS = [EPOCH_LEN, EPOCH_LEN + 4]  # the end of an epoch, and the middle of another one


def every_loader(test: Any) -> Any:
    marks = [() if name in ("a loader of one's own", "torchdata") else pytest.mark.slow for name in LOADERS]
    params = zip(LOADERS, LOADERS.values(), marks, strict=True)
    return pytest.mark.parametrize("make", [pytest.param(make, id=name, marks=mark) for name, make, mark in params])(
        test
    )


def make_trial(make: Callable[[], Any]) -> type[SmallTrial]:
    class Trial(SmallTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.experimental.disable_dataset_reproducibility_checks()

        def build_training_data_loader(self) -> Any:
            return make()

    return Trial


def train(make: Callable[[], Any], length: int, storage: Path, **arguments: Any) -> torch.Tensor:
    seed_everything(99 if "latest_checkpoint" in arguments else 3)
    lengths = {"max_length": pytorch.Batch(length)}
    return weights_of(fit_trial(make_trial(make), checkpoint_storage=storage, **lengths, **arguments))


@every_loader
def test_loaders_of_a_trial_resume_exactly(make: Callable[[], Any], tmp_path: Path) -> None:
    expected = train(make, LENGTH, tmp_path / "straight")
    for stop in STOPS:
        train(make, stop, tmp_path / str(stop))
        resumed = train(make, LENGTH, tmp_path / str(stop), latest_checkpoint="last")
        assert torch.equal(resumed, expected), stop


def fit(
    make: Callable[[], Any], ckpt_path: Any = None, trial: type[SmallTrial] = SmallTrial, seed: int = 3, **flags: Any
) -> pl.Trainer:
    seed_everything(seed)
    made = trainer(**flags)
    made.fit(TrialModule(trial), make(), of_torch(make_data()), ckpt_path=ckpt_path)
    return made


def weights_after(made: pl.Trainer) -> torch.Tensor:
    module: Any = made.lightning_module
    return weights_of(module.trial)


@every_loader
def test_given_loaders_resume_exactly(make: Callable[[], Any], tmp_path: Path) -> None:
    if isinstance(make(), pytorch.DataLoader):
        pytest.skip("pl.Trainer takes loaders of torch")
    expected = weights_after(fit(make, max_epochs=3))
    for stop in STOPS:
        directory = DeterminedCheckpoint(tmp_path / str(stop), policy="none")
        first = fit(make, max_steps=2 * stop, callbacks=[directory])
        first.save_checkpoint(tmp_path / "saved.ckpt")  # after the run
        for path in (tmp_path / "saved.ckpt", directory.last_checkpoint_path):
            assert torch.equal(weights_after(fit(make, path, seed=99, max_epochs=3)), expected), (stop, path)


@pytest.mark.parametrize("make", [OwnLoader, LOADERS["torchdata"], LOADERS["torchdata, workers"]])
def test_checkpoint_within_a_batch_lacks_the_position(make: Callable[[], Any], tmp_path: Path, caplog: Any) -> None:
    on_exception = pl.callbacks.OnExceptionCheckpoint(str(tmp_path), "failed")
    failing = failing_at(EPOCH_LEN + 2, OSError("a batch that was drawn and is not trained"))
    with pytest.raises(OSError, match="not trained"):
        fit(make, trial=failing, max_epochs=2, callbacks=[on_exception])
    assert "The checkpoint lacks the state of the training data" in caplog.text
    fit(make, tmp_path / "failed.ckpt", max_epochs=2)
    assert "no position of the training data" in caplog.text


def test_early_checkpoints_read_again_what_was_under_way(tmp_path: Path) -> None:
    """Their states may be from before the latest batches."""
    expected = weights_after(fit(OwnLoader, max_epochs=2))
    fit(OwnLoader, max_steps=2 * 5).save_checkpoint(tmp_path / "late.ckpt")
    fit(OwnLoader, max_steps=2 * 4).save_checkpoint(tmp_path / "early.ckpt")
    late, early = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("late", "early"))
    before = early[TRIAL_KEY]["resume"]["positions"][0]["data"]
    late[TRIAL_KEY]["resume"]["positions"][0]["data"] = {**before, "behind": 1}
    torch.save(late, tmp_path / "late.ckpt")
    assert torch.equal(weights_after(fit(OwnLoader, tmp_path / "late.ckpt", max_epochs=2)), expected)


@pytest.mark.parametrize("stop", [3, EPOCH_LEN])
def test_another_number_of_processes_resumes_at_the_end_of_an_epoch_only(stop: int, tmp_path: Path) -> None:
    fit(OwnLoader, max_steps=2 * stop).save_checkpoint(tmp_path / "of_one.ckpt")
    of_two = torch.load(tmp_path / "of_one.ckpt", weights_only=False)
    resume = of_two[TRIAL_KEY]["resume"]  # as two ranks would have written
    resume |= {name: 2 * resume[name] for name in ("world_size", "rng_states", "journals", "positions")}
    resume["gradients"] = 2 * [resume["gradients"]]
    torch.save(of_two, tmp_path / "of_two.ckpt")
    if stop == EPOCH_LEN:
        resumed = fit(OwnLoader, tmp_path / "of_two.ckpt", max_epochs=2)
        assert resumed.lightning_module.trial_run.state.batches_trained == 2 * EPOCH_LEN
    else:
        with pytest.raises(errors.CheckpointError, match=r"of 2 process\(es\) in the middle .* among 1 process"):
            fit(OwnLoader, tmp_path / "of_two.ckpt", max_epochs=2)


@pytest.mark.parametrize("make", [OwnLoader, LOADERS["torchdata"]])
def test_callbacks_may_look_at_the_data(make: Callable[[], Any]) -> None:
    class Looking(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            next(iter(trainer.train_dataloader), None)  # nothing after the last batch of one's own loader

    expected = weights_after(fit(make, max_epochs=2))
    assert torch.equal(weights_after(fit(make, max_epochs=2, callbacks=[Looking()])), expected)


def test_each_validation_starts_afresh(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    class Trial(SmallTrial):
        def build_validation_data_loader(self) -> Any:
            self.context.experimental.disable_dataset_reproducibility_checks()
            seen.append([])
            return OwnLoader()

        def evaluate_batch(self, batch: Any) -> Any:
            seen[-1].append(float(batch[0].sum()))
            return super().evaluate_batch(batch)

    fit_trial(Trial, checkpoint_storage=tmp_path, validation_period=pytorch.Batch(2))
    batches = seen[-1]
    assert batches == batches[:EPOCH_LEN] * 2


def test_states_that_cannot_be_read_are_named(tmp_path: Path, caplog: Any) -> None:
    class Foreign(OwnLoader):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "left": Left()}

    train(Foreign, 3, tmp_path)
    assert "positions[0]['data']['states'][0]['left'] is a tests.engine.test_stateful_data.Left" in caplog.text


def test_old_checkpoints_resume_as_before(tmp_path: Path, caplog: Any) -> None:
    first = fit(OwnLoader, max_steps=2 * 3)
    first.save_checkpoint(tmp_path / "saved.ckpt")
    old = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    del old[TRIAL_KEY]["resume"]["positions"][0]["data"]
    torch.save(old, tmp_path / "old.ckpt")
    fit(OwnLoader, tmp_path / "old.ckpt", max_epochs=1)
    assert "no position of the training data, which are of type OwnLoader: the run resumes after batch 3" in caplog.text


def test_states_of_workers_are_out_of_reach(tmp_path: Path, caplog: Any) -> None:
    fit(lambda: of_torch(Stream(), num_workers=1), max_steps=2).save_checkpoint(tmp_path / "saved.ckpt")
    assert "Stream has a state_dict(), which checkpoints cannot hold" in caplog.text
    assert "Use torchdata's StatefulDataLoader, or num_workers=0" in caplog.text


def test_other_data_are_refused(tmp_path: Path) -> None:
    train(lambda: of_torch(make_data(), sampler=Left()), 3, tmp_path)
    with pytest.raises(errors.InvalidCheckpointException, match=r"state of 1 part.*and 2 have a state_dict\(\)"):
        train(lambda: of_torch(Noisy(), sampler=Left()), 6, tmp_path, latest_checkpoint="last")


def test_finite_loaders_without_a_position_are_the_trials_own(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must repeat its data without end"):
        train(lambda: of_torch(Noisy(), sampler=RandomSampler(Noisy())), LENGTH, tmp_path)
