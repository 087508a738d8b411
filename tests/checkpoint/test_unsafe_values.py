"""Values that no resume could read safely: the first checkpoint of a run names them, by place and type."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from det_lightning import pytorch
from det_lightning.adapters import DeterminedCheckpointIO, TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint.unsafe_values import UnsafeValues
from tests import lightning
from tests.trials import SmallTrial, fit_trial

HPARAMS = {"global_batch_size": 8}
NEEDS_TRUST = ": a resume needs trusted=True"


class Meter:
    """A type that is not on the allow-list, with a tensor."""

    def __init__(self) -> None:
        self.values = torch.ones(2)


class Mode(enum.Enum):
    """Another one."""

    fast = 1


class Schedule:
    """A factor of the learning rate, which ``LambdaLR`` stores with its attributes."""

    def __init__(self) -> None:
        self.meter = Meter()

    def __call__(self, epoch: int) -> float:
        return 1.0


class Extra(torch.nn.Linear):
    """A module with state of its own."""

    def get_extra_state(self) -> Any:
        return Meter()

    def set_extra_state(self, state: Any) -> None:
        pass


class Keeper(pytorch.PyTorchCallback):
    """A callback with state of many types."""

    def state_dict(self) -> dict[str, Any]:
        plain = [1, (2.5, "a", None, np.arange(3), torch.ones(2))]
        return {"h": Meter(), "plain": plain, "deep": [{"mode": Mode.fast}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class KeepingTrial(SmallTrial):
    """Has such values in every place."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.extra = context.wrap_model(Extra(2, 2))
        schedule = torch.optim.lr_scheduler.LambdaLR(self.adam, Schedule())
        context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.MANUAL_STEP)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"c": Keeper()}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        self.sgd.state[next(self.head.parameters())]["mode"] = Mode.fast
        return metrics


class LightningKeeper(pl.Callback):
    """A callback of Lightning."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": Meter()}


def fit(trial: type[SmallTrial], folder: Path) -> None:
    arguments = {"max_length": pytorch.Batch(2), "checkpoint_period": pytorch.Batch(1), "checkpoint_storage": folder}
    fit_trial(trial, hparams=HPARAMS, **arguments)


def fit_with_files(trial: type[SmallTrial], folder: Path, plugins: Any = ()) -> None:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    lightning.fit(TrialModule(trial, HPARAMS), max_steps=4, callbacks=[LightningKeeper(), saver], plugins=list(plugins))


def fit_with_callback(trial: type[SmallTrial], folder: Path) -> None:
    checkpoints = DeterminedCheckpoint(folder, policy="none", period=pytorch.Batch(1))
    lightning.fit(TrialModule(trial, HPARAMS), max_steps=4, callbacks=[LightningKeeper(), checkpoints])


WAYS: dict[str, Callable[[type[SmallTrial], Path], None]] = {
    "Trainer.fit": fit,
    "DeterminedCheckpoint": fit_with_callback,
    "ModelCheckpoint": fit_with_files,
    "DeterminedCheckpointIO": lambda trial, folder: fit_with_files(trial, folder, [DeterminedCheckpointIO()]),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_value_is_named_once(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    WAYS[way](KeepingTrial, tmp_path)
    (said,) = [message for message in caplog.messages if NEEDS_TRUST in message]
    places = {
        "callbacks['c']['h']": "Meter",
        "callbacks['c']['deep'][0]['mode']": "Mode",
        "lr_schedulers_state_dict[2]['lr_lambdas'][0]['meter']": "Meter",
        "_extra_state']": "Meter",
        "['state'][0]['mode']": "Mode",
    }
    if way.startswith(("Model", "DeterminedCheckpointIO")):
        places["Lightning's callbacks['LightningKeeper']['x']"] = "Meter"
    assert [place for place, kind in places.items() if f"{place} is a {__name__}.{kind}" not in said] == []
    assert "['plain']" not in said


def test_resumable_run_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(SmallTrial, tmp_path)
    fit_with_files(SmallTrial, tmp_path / "files", [])
    assert [message for message in caplog.messages if NEEDS_TRUST in message and "LightningKeeper" not in message] == []


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": {Mode.fast: 1}}, "the key of callbacks['a'][<Mode.fast: 1>] is a "),
        ({"a": [1, {2, Mode.fast}]}, " is a tests.checkpoint.test_unsafe_values.Mode"),
        ({"a": type("Own", (dict,), {})(b=1)}, "callbacks['a'] is a tests.checkpoint.test_unsafe_values.Own"),
        ({"a": Meter}, "callbacks['a'] is a type"),
        ({"a": np.array([Meter()])}, "callbacks['a'] is a numpy.ndarray"),
        ({"a": np.ma.masked_array([1, 2], [False, True])}, f"'a'] is a {np.ma.MaskedArray.__module__}.MaskedArray"),
        ({"a": [np.str_("")]}, "callbacks['a'][0] is a numpy.str_"),
    ],
)
def test_values_in_any_container_are_named(value: Any, named: str, caplog: pytest.LogCaptureFixture) -> None:
    setattr(__import__(__name__, fromlist=["Own"]), "Own", type(value["a"]))  # noqa: B010 (so that it can be pickled)
    looks = UnsafeValues()
    for _ in range(2):
        looks.warn_of({"callbacks": value})
        assert looks.are_possible
    assert len(caplog.messages) == 1
    assert named in caplog.text


def test_plain_values_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    endless: list[Any] = [2**2039 - 1, np.str_("a"), np.zeros((0, 3)), torch.ones(2), {2.5: 1}]
    endless.append(endless)
    looks = UnsafeValues()
    looks.warn_of({"callbacks": endless})
    assert not looks.are_possible
    assert caplog.messages == []
