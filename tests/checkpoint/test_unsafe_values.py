"""Values that no resume could read safely: a run names them, by place and type, and weights beside them are read."""

from __future__ import annotations

import argparse
import collections
import decimal
import enum
import functools
import json
import os
import types
import zoneinfo
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from typer.testing import CliRunner

from det_lightning import errors, pytorch
from det_lightning.adapters import DeterminedCheckpointIO, TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
from det_lightning.checkpoint.format.layout import read_json
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.checkpoint.format.standard_values import save_state
from det_lightning.checkpoint.safe_load import holds_placeholder, read_state, read_weights
from det_lightning.checkpoint.unsafe_values import UnsafeValues
from det_lightning.cli.app import app
from tests import lightning
from tests.trials import SmallTrial, fit_trial, weights_of

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


# Whoever wants only weights is not stopped by objects elsewhere in a checkpoint, and no code of theirs is run


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


# Hyperparameters and configuration: they come back as they were, or not at all


class Options(collections.UserDict[str, Any]):
    """A dict of a configuration library."""


PLAIN_HPARAMS = {"global_batch_size": 8, "clip": float("inf")}
GIVEN = {
    **PLAIN_HPARAMS,
    "flag": np.bool_(False),
    "layers": np.int64(3),
    "sizes": collections.UserList([1, Options(width=np.array([2, 3]))]),
    "groups": [{"activation": torch.nn.ReLU(), "lr": torch.tensor(0.5)}],
    "names": {"a", "b"},
}
STORED = {**PLAIN_HPARAMS, "flag": False, "layers": 3, "sizes": [1, {"width": [2, 3]}], "groups": [{"lr": 0.5}]}


def require_stored(hparams: dict[str, Any]) -> None:
    assert hparams == STORED
    assert (hparams["flag"], type(hparams["layers"])) == (False, int)


def refuse(constant: str) -> None:
    raise AssertionError(constant)


@pytest.mark.parametrize("exp_conf", [None, {"data": {"path": Path("x"), "ratio": float("nan")}}])
def test_settings_come_back_from_a_directory(
    tmp_path: Path, exp_conf: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = {"max_length": pytorch.Batch(2), "checkpoint_period": pytorch.Batch(1)}
    fit_trial(SmallTrial, None, hparams=dict(GIVEN), exp_conf=exp_conf, checkpoint_storage=tmp_path, **lengths)
    assert caplog.text.count("hparams['names'] is a set, which JSON cannot hold") == 1
    assert caplog.text.count("hparams['groups'][0]['activation'] is a torch.nn.modules.activation.ReLU") == 1
    path = CheckpointStorage(tmp_path).newest()
    assert path is not None
    for file in Path(path).glob("*.json"):
        json.loads(file.read_text(), parse_constant=refuse)
    assert "names" not in (json.loads(Path(path, "load_data.json").read_text())["hparams"] or {})
    context = pytorch.load_trial_from_checkpoint_path(path, trial_class=SmallTrial).context
    require_stored(context.get_hparams())
    with pytest.raises(ValueError, match="no hyperparameter 'names'"):
        context.get_hparam("names")
    if exp_conf is not None:
        assert context.get_data_config()["ratio"] != context.get_data_config()["ratio"]
        assert "path" not in context.get_data_config()


@pytest.mark.parametrize("as_directory", [False, True])
def test_lightning_file_stores_settings_by_the_same_rules(
    tmp_path: Path, as_directory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def train(module: TrialModule, folder: Path) -> Path:
        trainer = lightning.fit(module, max_steps=2, plugins=[DeterminedCheckpointIO()] if as_directory else [])
        trainer.save_checkpoint(folder / "it.ckpt")
        return folder / "it.ckpt"

    module = TrialModule(SmallTrial, hparams=dict(GIVEN))
    assert module.hparams == STORED  # as loggers get them
    first = train(module, tmp_path / "first")
    assert "hparams['names'] is a set" in caplog.text
    caplog.clear()
    loaded = TrialModule.load_from_checkpoint(first, trial=SmallTrial)
    require_stored(loaded.trial.context.get_hparams())
    again = TrialModule.load_from_checkpoint(train(loaded, tmp_path / "again"), trial=SmallTrial)
    require_stored(again.trial.context.get_hparams())
    assert "is a set" not in caplog.text


def test_script_stores_settings_by_the_same_rules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"hparams": GIVEN, "experiment_config": {"gap": float("-inf")}, "home": tmp_path}
    content = CheckpointContent({}, TrialState(1), given, notes={"note": np.float32("nan")})
    path = tmp_path / CheckpointStorage(tmp_path).write(content)
    assert "hparams['names'] is a set" in caplog.text
    assert "home is a " in caplog.text
    require_stored(read_settings(None, read_json(path / "load_data.json"))["hparams"])
    assert read_settings(None, read_json(path / "load_data.json"))["experiment_config"] == {"gap": float("-inf")}
    assert read_json(path / "metadata.json")["note"] == "NaN"
