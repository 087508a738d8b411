"""Tracebacks show the user's frames, unless the error may be a bug of det_lightning."""

from __future__ import annotations

import importlib
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from det_lightning.errors import InvalidExperimentException
from det_lightning.tracebacks import shorten_lines
from tests.lightning import pl
from tests.trials import SmallTrial, fit_trial


class FailsInTraining(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return torch.nn.Linear(5, 1)(batch[0])


class ReturnsNothing(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return None


class LacksHyperparameter(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return self.context.get_hparam("lr")


def fit_with_lightning(trial_class: type[SmallTrial]) -> None:
    trainer = pl.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    trainer.fit(TrialModule(trial_class, hparams={}))


def frames_of(fit: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """Return file and function of each frame in the traceback of a failing training."""
    with pytest.raises(Exception) as raised:
        fit(*arguments, **options)
    frames = traceback.extract_tb(raised.value.__traceback__)
    return [f"{Path(frame.filename).name}:{frame.name}" for frame in frames][1:]


def test_traceback_has_the_frames_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "det_lightning.tracebacks"):
        start, train, *in_torch = frames_of(fit_trial, FailsInTraining)
    assert [start, train] == ["trials.py:fit_trial", "test_tracebacks.py:train_batch"]
    assert {frame.partition(":")[0] for frame in in_torch} == {"module.py", "linear.py"}
    assert "in training_step" in caplog.text


@pytest.mark.parametrize(
    ("trial_class", "expected"),
    [(ReturnsNothing, []), (LacksHyperparameter, ["test_tracebacks.py:train_batch"])],
)
def test_refusals_end_in_the_code_of_the_user(trial_class: type[SmallTrial], expected: list[str]) -> None:
    assert frames_of(fit_trial, trial_class)[1:] == expected
    frames = frames_of(fit_with_lightning, trial_class)
    assert frames[:1] == ["test_tracebacks.py:fit_with_lightning"]
    assert [frame for frame in frames[1:] if not frame.startswith(("trainer.py:", "call.py:"))] == expected


def test_unwritable_storage_has_no_frames() -> None:
    assert frames_of(fit_trial, checkpoint_storage="/proc/storage", checkpoint_policy="all") == ["trials.py:fit_trial"]


def test_refused_settings_have_no_frames() -> None:
    with pytest.raises(InvalidExperimentException) as raised, pytorch.init(hparams={"global_batch_size": "8"}):
        pass
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert frames == ["test_refused_settings_have_no_frames", "__enter__"]


def test_traceback_of_a_bug_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_lightning.engine.metrics.MetricWindow.add", 0)
    assert "module.py:training_step" in frames_of(fit_trial)


def test_logs_have_the_frames_of_the_user() -> None:
    package = Path(importlib.import_module("det_lightning").__file__ or "").parent
    log = f"""INFO: training
[rank0]: Traceback (most recent call last):
[rank0]:   File "{package}/exec/harness.py", line 55, in <module>
[rank0]:     sys.exit(main(sys.argv[1]))
[rank0]:              ^^^^^^^^^^^^^^^^^
[rank0]:   File "/home/me/workdir/model_def.py", line 10, in train_batch
[rank0]:     self.context.get_hparam("lr")
[rank0]:   File "{package}/pytorch/_settings.py", line 182, in get_hparam
[rank0]:     raise ValueError(self._explain_missing(name))
[rank0]: ValueError: There is no hyperparameter 'lr'"""
    lines = log.splitlines()
    kept = [*lines[:2], *lines[5:7], "  (2 frames of libraries are left out)", lines[-1]]
    assert list(shorten_lines(lines)) == kept
