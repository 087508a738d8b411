"""Data that ``fit`` and ``validate`` are given: a data module, or loaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from tests.lightning import pl, trainer
from tests.trials import BATCH_SIZE, EPOCH_LEN, SmallTrial, make_data, seed_everything, weights_of

NOTHING: Any = []


class OwnData(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(make_data(), batch_size=16)


class WithoutData(SmallTrial):
    def build_training_data_loader(self) -> Any:
        raise NotImplementedError

    build_validation_data_loader = build_training_data_loader


def fit(trial: Any, flags: Any = None, **data: Any) -> TrialModule:
    seed_everything(99 if "ckpt_path" in data else 3)
    module = TrialModule(trial)
    trainer(**(flags if flags and "max_steps" in flags else {"max_epochs": 3, **(flags or {})})).fit(module, **data)
    return module


TRAIN, VAL = OwnData().train_dataloader(), OwnData().val_dataloader()


@pytest.mark.parametrize("flags", [{}, {"val_check_interval": 3}, {"limit_train_batches": 4}, {"overfit_batches": 2}])
def test_torchs_loaders_train_equally(flags: dict[str, Any]) -> None:
    expected = weights_of(fit(SmallTrial, flags).trial)
    ways: list[dict[str, Any]] = [
        {"datamodule": OwnData()},
        {"train_dataloaders": TRAIN, "val_dataloaders": VAL},
        {"train_dataloaders": [TRAIN], "val_dataloaders": [VAL]},
        {"train_dataloaders": pytorch.DataLoader(make_data(), BATCH_SIZE, shuffle=True), "val_dataloaders": VAL},
        {"train_dataloaders": pl.utilities.CombinedLoader([TRAIN], "sequential"), "val_dataloaders": VAL},
    ]
    for data in ways:
        assert torch.equal(weights_of(fit(WithoutData, flags, **data).trial), expected), data


@pytest.mark.parametrize("argument", ["datamodule", "train_dataloaders"])
def test_a_data_module_is_called(argument: str) -> None:
    calls: list[Any] = []

    def noting(method: str) -> Any:
        def note(self: OwnData, **stage: str) -> Any:
            calls.append((method, *stage.values()))
            return getattr(super(type(self), self), method)(**stage)

        return note

    methods = ("prepare_data", "setup", "train_dataloader", "val_dataloader", "teardown")
    data = type("Data", (OwnData,), {method: noting(method) for method in methods})()
    fit(WithoutData, {"max_epochs": 2}, **{argument: data})
    assert calls == [
        ("prepare_data",),
        ("setup", "fit"),
        ("train_dataloader",),
        ("val_dataloader",),
        ("teardown", "fit"),
    ]


@pytest.mark.parametrize("saved_by", ["file", "directory"])
@pytest.mark.parametrize("stopped_after", [5, EPOCH_LEN])
def test_map_style_loaders_resume_exactly(saved_by: str, stopped_after: int, tmp_path: Path) -> None:
    expected = weights_of(fit(WithoutData, datamodule=OwnData()).trial)
    directory = DeterminedCheckpoint(tmp_path / "storage", policy="none")
    seed_everything()
    first = trainer(max_steps=2 * stopped_after, callbacks=[directory])
    first.fit(TrialModule(WithoutData), datamodule=OwnData())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    path = tmp_path / "saved.ckpt" if saved_by == "file" else directory.last_checkpoint_path
    resumed = fit(WithoutData, ckpt_path=path, datamodule=OwnData())
    assert torch.equal(weights_of(resumed.trial), expected)


def test_training_data_can_be_passed_alone() -> None:
    module = fit(SmallTrial, train_dataloaders=TRAIN)
    assert torch.equal(weights_of(module.trial), weights_of(fit(SmallTrial).trial))
    assert "validation_loss" in module.trainer.callback_metrics


def data_module(**methods: Any) -> Any:
    return type("Data", (pl.LightningDataModule,), {"train_dataloader": OwnData.train_dataloader, **methods})()


@pytest.mark.parametrize(
    "data",
    [
        {"train_dataloaders": TRAIN, "val_dataloaders": []},
        {"train_dataloaders": TRAIN, "val_dataloaders": DataLoader(NOTHING, 8)},
        {"datamodule": data_module()},
        {"datamodule": data_module(val_dataloader=lambda self: [])},
        {"datamodule": data_module(val_dataloader=lambda self: DataLoader(NOTHING, 8))},
    ],
)
def test_fit_without_validation_data_only_trains(data: dict[str, Any]) -> None:
    module = fit(WithoutData, **data)
    assert module.trial_run.state.batches_trained == 3 * EPOCH_LEN
    assert "validation_loss" not in module.trainer.callback_metrics


def test_validate_builds_no_other_data() -> None:
    for batches in (0, 2):
        assert trainer(overfit_batches=batches).validate(TrialModule(WithoutData), VAL, verbose=False)


@pytest.mark.parametrize("data", [{"dataloaders": VAL}, {"dataloaders": {"a": VAL}}, {"datamodule": OwnData()}])
def test_validate_takes_given_data(data: dict[str, Any]) -> None:
    half = torch.utils.data.Subset(make_data(), range(25))
    module = fit(WithoutData, datamodule=OwnData())
    own = trainer().validate(module, **data, verbose=False)
    assert own == [{name: value.item() for name, value in module.trainer.callback_metrics.items()}]
    assert own != trainer().validate(module, dataloaders=DataLoader(half, batch_size=16), verbose=False)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(make_data())


class Counted(Stream):
    def __len__(self) -> int:
        return len(make_data())


def test_iterables_repeat_and_resume_inexactly(tmp_path: Path, caplog: Any) -> None:
    stream = DataLoader(Counted(), batch_size=BATCH_SIZE)
    first = trainer(max_steps=2 * 5)
    first.fit(TrialModule(WithoutData), train_dataloaders=stream, val_dataloaders=[])
    first.save_checkpoint(tmp_path / "saved.ckpt")
    assert "The training data" not in caplog.text
    resumed = fit(WithoutData, ckpt_path=tmp_path / "saved.ckpt", train_dataloaders=stream, val_dataloaders=[])
    assert "no position of the training data, which are of type DataLoader" in caplog.text
    assert "the run resumes after batch 5 of a new pass" in caplog.text
    assert resumed.trial_run.state.batches_trained == 3 * EPOCH_LEN


def test_data_without_a_length_need_a_limit(caplog: Any) -> None:
    stream = DataLoader(Stream(), batch_size=BATCH_SIZE)
    data = {"train_dataloaders": stream, "val_dataloaders": []}
    limited = fit(WithoutData, {"limit_train_batches": 10}, **data)
    assert limited.trial_run.state.batches_trained == 30
    assert trainer().validate(limited, stream, verbose=False)
    with pytest.raises(errors.UnsupportedTrainerFlags, match=r"max_epochs=3 with training data that have no length"):
        fit(WithoutData, **data)
    assert fit(WithoutData, {"max_steps": 2 * 3}, **data).trial_run.state.batches_trained == 3
    with pytest.raises(RuntimeError, match="without a length, end after 7 batches: give the data a __len__"):
        fit(WithoutData, {"max_steps": 100}, **data)


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        ({"train_dataloaders": [TRAIN] * 2}, "train_dataloader: .*Combine their datasets"),
        ({"train_dataloaders": {"a": TRAIN}}, "train_dataloader: a trial takes one loader"),
        ({"val_dataloaders": {"a": VAL, "b": []}}, "one loader; got a dict of loaders"),
        ({"val_dataloaders": pl.utilities.CombinedLoader([VAL, VAL], "sequential")}, "got a list of loaders"),
        ({"train_dataloaders": 5}, "takes a loader or any iterable; got 5"),
    ],
)
def test_several_loaders_are_refused(data: dict[str, Any], refusal: str) -> None:
    with pytest.raises(errors.UnsupportedTrainerFlags, match=refusal):
        fit(SmallTrial, **data)


def test_overfit_batches_of_a_list_are_refused() -> None:
    with pytest.raises(errors.UnsupportedTrainerFlags, match=r"overfit_batches=2 needs a .*data are a builtins.list"):
        fit(WithoutData, {"overfit_batches": 2}, train_dataloaders=[[*TRAIN]])


class Shuffled(torch.utils.data.Sampler[int]):
    """Draws its order from the number of the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(make_data())

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist())


@pytest.mark.parametrize("by_batches", [False, True])
def test_samplers_know_the_epoch(by_batches: bool, tmp_path: Path) -> None:
    orders = list[Any]()

    class Recording(WithoutData):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            orders.append(batch[1].tolist())
            return super().train_batch(batch, epoch_idx, batch_idx)

    def loader() -> Any:
        batches = torch.utils.data.BatchSampler(Shuffled(), BATCH_SIZE, drop_last=False)
        by_size = DataLoader(make_data(), BATCH_SIZE, sampler=Shuffled())
        return DataLoader(make_data(), batch_sampler=batches) if by_batches else by_size

    expected = list[Any]()
    for epoch in range(3):
        plain = loader()
        plain.batch_sampler.sampler.set_epoch(epoch)
        expected += [targets.tolist() for _, targets in plain]
    first = trainer(max_steps=2 * (EPOCH_LEN + 2))
    first.fit(TrialModule(Recording), train_dataloaders=loader(), val_dataloaders=[])
    first.save_checkpoint(tmp_path / "saved.ckpt")
    trainer(max_epochs=3).fit(TrialModule(Recording), loader(), val_dataloaders=[], ckpt_path=tmp_path / "saved.ckpt")
    assert orders == expected


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"])
def test_hooks_of_transfers_are_refused(hook: str) -> None:
    with pytest.raises(errors.UnsupportedTrainerFlags, match=rf"Data has {hook}, and a trial moves its batches itself"):
        fit(WithoutData, datamodule=data_module(**{hook: lambda self, batch, *rest: batch}))


def test_lost_states_of_callbacks_are_warned_of(tmp_path: Path, caplog: Any) -> None:
    def fit_from(path: Any) -> pl.Trainer:
        stopping = pl.callbacks.EarlyStopping("validation_loss")
        last = trainer(callbacks=[stopping, checkpoints], max_epochs=1 if path is None else 2)
        last.fit(TrialModule(SmallTrial), ckpt_path=path)
        return last

    checkpoints = DeterminedCheckpoint(tmp_path / "storage", policy="none")
    fit_from(None).save_checkpoint(tmp_path / "saved.ckpt")
    directory = checkpoints.last_checkpoint_path
    fit_from(tmp_path / "saved.ckpt")
    assert "no states of Lightning's callbacks" not in caplog.text
    fit_from(directory)
    assert "no states of Lightning's callbacks: EarlyStopping start over" in caplog.text


def test_lost_state_of_a_data_module_is_warned_of(tmp_path: Path, caplog: Any) -> None:
    checkpoints = DeterminedCheckpoint(tmp_path, policy="none")
    fit(WithoutData, {"callbacks": [checkpoints]}, datamodule=OwnData())
    assert "state_dict" not in caplog.text
    fit(WithoutData, {"callbacks": [checkpoints]}, datamodule=data_module(state_dict=lambda self: {"seen": 3}))
    assert "without the state_dict() of Data" in caplog.text
