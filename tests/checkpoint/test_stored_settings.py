"""Hyperparameters and configuration in checkpoints: they come back as they were, or not at all."""

from __future__ import annotations

import collections
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import pytorch
from det_lightning.adapters import DeterminedCheckpointIO, TrialModule
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
from det_lightning.checkpoint.format.layout import read_json
from det_lightning.checkpoint.format.resume_state import read_settings
from tests import lightning
from tests.trials import SmallTrial, fit_trial


class Options(collections.UserDict[str, Any]):
    """A dict of a configuration library."""


PLAIN = {"global_batch_size": 8, "clip": float("inf")}
HPARAMS = {
    **PLAIN,
    "flag": np.bool_(False),
    "layers": np.int64(3),
    "sizes": collections.UserList([1, Options(width=np.array([2, 3]))]),
    "groups": [{"activation": torch.nn.ReLU(), "lr": torch.tensor(0.5)}],
    "names": {"a", "b"},
}
STORED = {**PLAIN, "flag": False, "layers": 3, "sizes": [1, {"width": [2, 3]}], "groups": [{"lr": 0.5}]}


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
    fit_trial(SmallTrial, None, hparams=dict(HPARAMS), exp_conf=exp_conf, checkpoint_storage=tmp_path, **lengths)
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

    module = TrialModule(SmallTrial, hparams=dict(HPARAMS))
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
    given = {"hparams": HPARAMS, "experiment_config": {"gap": float("-inf")}, "home": tmp_path}
    content = CheckpointContent({}, TrialState(1), given, notes={"note": np.float32("nan")})
    path = tmp_path / CheckpointStorage(tmp_path).write(content)
    assert "hparams['names'] is a set" in caplog.text
    assert "home is a " in caplog.text
    require_stored(read_settings(None, read_json(path / "load_data.json"))["hparams"])
    assert read_settings(None, read_json(path / "load_data.json"))["experiment_config"] == {"gap": float("-inf")}
    assert read_json(path / "metadata.json")["note"] == "NaN"


def test_plain_settings_need_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    content = CheckpointContent({}, TrialState(1), {"hparams": {"lr": 0.1}, "experiment_config": {}})
    path = tmp_path / CheckpointStorage(tmp_path).write(content)
    assert caplog.text == ""
    assert read_json(path / "load_data.json").keys() == {
        *("trial_type", "experiment_config", "hparams", "trial_cls_spec", "is_trainer")
    }
