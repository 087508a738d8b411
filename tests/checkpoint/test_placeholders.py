"""Whoever wants only weights is not stopped by objects elsewhere in a checkpoint, and no code of theirs is run."""

from __future__ import annotations

import argparse
import collections
import decimal
import functools
import os
import types
import zoneinfo
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from typer.testing import CliRunner

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.checkpoint.format.standard_values import save_state
from det_lightning.checkpoint.safe_load import holds_placeholder, read_state, read_weights
from det_lightning.cli.app import app
from tests import lightning
from tests.checkpoint.test_unsafe_values import HPARAMS, KeepingTrial, LightningKeeper, Meter, Mode
from tests.trials import SmallTrial, weights_of


class Cyclic:
    """Keeps a method of itself, as ``CyclicLR`` did before torch 2."""

    class Inner:
        """A class within a class."""

    def __init__(self) -> None:
        self.scale_fn = self.scale

    def scale(self) -> None:
        pass


class Slotted:
    """An object without a dict."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class OwnDict(dict[str, Any]):
    """A dict that is none of Python's."""


class OwnList(list[Any]):
    """A list that is none of Python's."""


Pair = collections.namedtuple("Pair", ["first", "second"])


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], tuple(self.call[1:])


OBJECTS: list[Any] = [Meter(), Meter, Mode.fast, Slotted(), OwnDict(a=1, b=Meter()), OwnDict(a=1), OwnList([1, 2])]
OBJECTS += [OwnList([1]), Pair(1, Meter()), collections.UserDict(a=1), collections.ChainMap({"a": 1})]
OBJECTS += [functools.partial(print, 1, end=""), decimal.Context(), print, {Mode.fast: [1, {"a": Meter()}]}]
OBJECTS += [{Mode.fast, 2}, collections.OrderedDict(a=Meter())]
# Torch's reader knows these types, but cannot fill them.
OBJECTS += [collections.deque([1]), collections.defaultdict(list, a=[1]), zoneinfo.ZoneInfo("UTC")]
OBJECTS += [np.array([None, "a"]), Cyclic().scale_fn, [Cyclic(), Cyclic.Inner()]]
OBJECTS += [Runs(print, "code was run"), Runs(os.system, "touch code-was-run")]


def save(folder: Path, value: Any, zipped: bool = True) -> Path:
    state = {
        "models_state_dict": [collections.OrderedDict(weight=torch.arange(3.0))],
        "callbacks": {"c": value, "again": [value, 5]},
        "after": [torch.ones(2), {"a": (1, "b")}],
    }
    torch.save(state, folder / "state.pth", _use_new_zipfile_serialization=zipped)
    return folder / "state.pth"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_weights_are_read_beside_any_object(
    value: Any, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, value, zipped)
    with pytest.raises(errors.UnsafeCheckpointError):
        read_state(path)
    state = read_weights(path)
    assert torch.equal(state["models_state_dict"][0]["weight"], torch.arange(3.0))
    assert torch.equal(state["after"][0], torch.ones(2))
    assert state["after"][1] == {"a": (1, "b")}
    assert state["callbacks"]["again"][1] == 5
    assert holds_placeholder(state["callbacks"]["c"])
    assert not (tmp_path / "code-was-run").exists()
    assert "code was run" not in capfd.readouterr().out


def in_a_parameter(value: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.extra = value  # type: ignore[attr-defined]
    return parameter


AROUND: dict[str, Callable[[Any], Any]] = {
    "a namespace": lambda value: argparse.Namespace(a=value),
    "a simple namespace": lambda value: types.SimpleNamespace(a=[value]),
    "a deque": lambda value: collections.deque([1, value]),
    "a slice": lambda value: slice(value),
    "a frozen set": lambda value: frozenset({value}),
    "a default dict": lambda value: collections.defaultdict(list, a=value),
    "the factory of a default dict": lambda value: collections.defaultdict(type(value)),
    "a parameter": in_a_parameter,
}


@pytest.mark.parametrize("around", AROUND)
def test_placeholder_is_found_anywhere(around: str, tmp_path: Path) -> None:
    state = {"models_state_dict": [{"w": torch.ones(2)}], "callbacks": {"c": AROUND[around](Meter())}}
    save_state(state, tmp_path / "state.pth")
    assert holds_placeholder(read_weights(tmp_path / "state.pth")["callbacks"])
    save_state({"models_state_dict": state["callbacks"]}, tmp_path / "state.pth")
    with pytest.raises(errors.UnsafeCheckpointError, match=r"Meter.* could run code"):
        read_weights(tmp_path / "state.pth")


@pytest.mark.parametrize("path", ["resume.settings", "extra.settings", "load_data", "trial_state"])
def test_object_in_settings_is_refused(path: str, tmp_path: Path) -> None:
    entry: Any = {"hparams": {"lr": Meter()}}
    for name in reversed(path.split(".")):
        entry = {name: entry}
    torch.save({"state_dict": {}, "det_lightning": {"state": {}, **entry}}, tmp_path / "it.ckpt")
    with pytest.raises(errors.UnsafeCheckpointError, match=r"Meter.* could run code"):
        read_weights(tmp_path / "it.ckpt")


@pytest.mark.parametrize("place", ["models_state_dict", "state_dict", "settings"])
def test_object_among_weights_is_refused(place: str, tmp_path: Path) -> None:
    for value in OBJECTS:
        torch.save({place: [collections.OrderedDict(weight=torch.ones(2), extra=value)]}, tmp_path / "state.pth")
        with pytest.raises(errors.UnsafeCheckpointError):
            read_weights(tmp_path / "state.pth")


def test_only_trust_makes_an_object_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, Cyclic.Inner())
    assert isinstance(read_weights(path, trusted=True)["callbacks"]["c"], Cyclic.Inner)
    monkeypatch.delattr(Cyclic, "Inner")
    with pytest.raises(errors.IncompleteCheckpointError, match=r"a class in the file cannot be imported: .*Inner"):
        read_state(path, trusted=True)
    assert torch.equal(read_weights(path, trusted=True)["models_state_dict"][0]["weight"], torch.arange(3.0))


class WeightsTrial(KeepingTrial):
    """Keeps objects everywhere but in its models."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.extra.get_extra_state = lambda: torch.ones(1)  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallTrial, str, Path]:
    """A trained trial, its checkpoint, and the file of Lightning with the same weights."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch, pytorch.init(hparams=HPARAMS) as context:
        patch.chdir(folder)  # whose files become the code
        trial = WeightsTrial(context)
        saver = ModelCheckpoint(folder, filename="it", every_n_train_steps=1)
        pytorch.Trainer(trial, context, callbacks=[saver, LightningKeeper()]).fit(
            max_length=pytorch.Batch(2), checkpoint_storage=folder / "storage"
        )
    path = CheckpointStorage(folder / "storage").newest()
    assert path is not None
    return trial, path, folder / "it.ckpt"


def test_trial_gets_its_weights(saved: tuple[SmallTrial, str, Path]) -> None:
    trial, path, file = saved
    loaded = [TrialModule.load_from_checkpoint(one, trial=WeightsTrial).trial for one in (path, file)]
    for one in [*loaded, pytorch.load_trial_from_checkpoint_path(path, trial_class=WeightsTrial)]:
        assert torch.equal(weights_of(one), weights_of(trial))
        assert one.context.get_hparams() == HPARAMS


def test_objects_among_hyperparameters_are_refused(saved: tuple[SmallTrial, str, Path], tmp_path: Path) -> None:
    checkpoint = torch.load(saved[2], weights_only=False)
    checkpoint["det_lightning"]["load_data"] = checkpoint["det_lightning"]["resume"]["settings"] = None
    checkpoint["hyper_parameters"] = {**HPARAMS, "meter": types.SimpleNamespace(value=Meter())}
    torch.save(checkpoint, tmp_path / "it.ckpt")
    with pytest.raises(errors.UnsafeCheckpointError, match=r"hparams in .*it\.ckpt hold objects.* Pass hparams=\.\.\."):
        TrialModule.load_from_checkpoint(tmp_path / "it.ckpt", trial=WeightsTrial)
    module = TrialModule.load_from_checkpoint(tmp_path / "it.ckpt", trial=WeightsTrial, hparams=HPARAMS)
    assert torch.equal(weights_of(module.trial), weights_of(saved[0]))
    module = TrialModule.load_from_checkpoint(tmp_path / "it.ckpt", trial=WeightsTrial, weights_only=False)
    assert isinstance(module.trial.context.get_hparam("meter").value, Meter)


@pytest.mark.parametrize("kind", ["weights", "safetensors", "lightning"])
def test_only_weights_are_exported(kind: str, saved: tuple[SmallTrial, str, Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["checkpoint", "export", saved[1], "--to", kind, "-o", str(tmp_path / "it")])
    assert (result.exit_code, (tmp_path / "it").exists()) == ((1, False) if kind == "lightning" else (0, True))
    assert ("pass --trusted" in result.stderr) == (kind == "lightning")


def test_resume_needs_the_objects(saved: tuple[SmallTrial, str, Path]) -> None:
    _, path, file = saved
    with pytorch.init(hparams=HPARAMS) as context, pytest.raises(errors.UnsafeCheckpointError):
        pytorch.Trainer(WeightsTrial(context), context).fit(max_length=pytorch.Batch(3), latest_checkpoint=path)
    with pytest.raises(errors.UnsafeCheckpointError):
        lightning.fit(TrialModule(WeightsTrial, hparams=HPARAMS), file)
