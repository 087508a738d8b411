"""What a run logs, what it warns of, once, and where its progress bar goes."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage
from tests.launching import environment
from tests.trials import SmallTrial, fit_trial
from tests.warm_python import WarmPython


def fit(trial_class: type[SmallTrial] = SmallTrial, **arguments: Any) -> Any:
    lengths = {"max_length": pytorch.Batch(6), "reporting_period": pytorch.Batch(2)}
    return fit_trial(trial_class, **{**lengths, **arguments})


def test_facts_of_a_run_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="det_lightning")
    periods: dict[str, Any] = {"validation_period": pytorch.Batch(4), "checkpoint_storage": tmp_path}
    trial = fit(max_length=pytorch.Batch(4), **periods)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    number = r"[0-9.e+-]+"
    speed = rf"; (\d+) batches \({number} batches/s\) in {number} s\."
    expected = [
        rf"Checkpoints go to {tmp_path}\.",
        rf"Training SmallTrial on {trial.context.device}, 1 process, from batch 0\.",
        rf"Training after 2 batches: loss={number}, batch=0\.5{speed}",
        rf"Training after 4 batches: loss={number}, batch=2\.5{speed}",
        rf"Validation after 4 batches: validation_loss={number}{speed}",
        rf"Checkpoint {checkpoint} after 4 batches\.",
    ]
    assert len(caplog.messages) == len(expected)
    found = [re.fullmatch(pattern, message) for pattern, message in zip(expected, caplog.messages, strict=True)]
    assert None not in found, caplog.messages
    assert [match.groups() for match in found if match and match.groups()] == [("2",), ("2",), ("4",)]
    caplog.clear()
    fit(latest_checkpoint="last", **periods)
    assert f"1 process, from batch 4, resumed from checkpoint {checkpoint}." in caplog.text


SCRIPT = """
from det_lightning import pytorch
from tests.trials import SmallTrial

with pytorch.init(enable_tensorboard_logging=False) as context:
    pytorch.Trainer(SmallTrial(context), context).fit(
        max_length=pytorch.Batch(4), checkpoint_policy="none", checkpoint_storage="storage"
    )
print("printed by the script")
"""


@pytest.mark.slow
def test_the_progress_bar_goes_to_a_terminal(warm_python: WarmPython) -> None:
    command = [warm_python.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout == "printed by the script\n"
    assert "Epoch" not in done.stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # of no width it would show nothing
    streams: Any = {"stdout": subprocess.PIPE, "stderr": theirs, "text": True}
    with subprocess.Popen(command, env=environment(), **streams) as process:
        os.close(theirs)
        assert process.stdout is not None
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the script has closed the terminal
                break
        assert process.stdout.read() == "printed by the script\n"
    os.close(ours)
    assert b"Epoch 0" in shown


# Warnings


def warnings_in(caplog: pytest.LogCaptureFixture, pattern: str = "") -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in found if re.search(pattern, message)]


def test_ordinary_runs_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hparams = {"lr": 0.1, "layers": [1, 2], "api_token": "secret-1", "nested": {"a": (1, 2), "nan": math.nan}}
    fit(hparams=hparams, aggregation_frequency=3)
    fit(hparams=hparams, aggregation_frequency=3, latest_checkpoint="last", max_length=pytorch.Batch(8))
    assert warnings_in(caplog) == []


class NotWrapped(SmallTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.models = {"extra": torch.nn.Linear(1, 1)}
        self.temperature = torch.nn.Parameter(torch.ones(()))
        others = [*self.models["extra"].parameters(), self.temperature, torch.nn.Parameter(torch.ones(2))]
        self.other = context.wrap_optimizer(torch.optim.Adam(others, lr=0.1))
        self.kept = torch.optim.lr_scheduler.StepLR(self.other, 1)


def test_unwrapped_parts_that_train_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit(NotWrapped)
    parameters, kept = warnings_in(caplog)
    assert parameters == (
        "Optimizer 2, a Adam, updates 4 parameters of no wrapped model: models.weight, models.bias, temperature, "
        "one of shape (2,). The parameters are trained, but not saved in checkpoints and not exchanged between ranks. "
        "Pass their model through context.wrap_model() in the trial's __init__."
    )
    assert kept.startswith("self.kept, a StepLR, sets the learning rate of optimizer 2, a Adam, and is not wrapped")


class Nested(SmallTrial):
    """Keeps the parts of a scheduler that it wraps."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        kinds = torch.optim.lr_scheduler
        optimizer = context.wrap_optimizer(torch.optim.Adam(self.head.parameters(), lr=0.1))
        self.parts = [kinds.ConstantLR(optimizer, 1.0), kinds.StepLR(optimizer, 1)]
        sequence = kinds.SequentialLR(optimizer, self.parts, [2])
        context.wrap_lr_scheduler(sequence, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)


class Apex(SmallTrial):
    """Its optimizers update float32 masters of the models' parameters."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        models, optimizers = [self.body, self.head], [self.adam, self.sgd]
        (self.body, self.head), (self.adam, self.sgd) = context.configure_apex_amp(models, optimizers, opt_level="O2")


@pytest.mark.parametrize("trial_class", [Nested, Apex])
def test_inner_parts_count_as_wrapped(trial_class: type[SmallTrial], caplog: pytest.LogCaptureFixture) -> None:
    fit(trial_class)
    assert warnings_in(caplog, "wrap") == []


def test_periods_below_one_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    periods = {"checkpoint_period": 0, "validation_period": -1, "reporting_period": 0}
    fit(SmallTrial, **{name: pytorch.Batch(value) for name, value in periods.items()})
    starts = [message.partition(" is below 1, and so due every time")[0] for message in warnings_in(caplog)]
    assert sorted(starts) == sorted(f"{name}=Batch({value})" for name, value in periods.items())


def test_resuming_a_finished_run_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit()
    fit(latest_checkpoint="last")
    (message,) = warnings_in(caplog)
    assert "max_length=Batch(6) is reached after 6 batches and 0 epochs." in message


def test_changed_hparams_of_a_resume_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit(hparams={"lr": 0.1, "depth": 3, "optimizer": {"name": "adam", "beta": 0.9}, "api_token": "secret-1"})
    (checkpoint,) = CheckpointStorage("storage").list_ids()
    changed = {"lr": 0.2, "width": 5, "optimizer": {"name": "adam", "beta": 0.8}, "api_token": "secret-2"}
    fit(hparams=changed, latest_checkpoint="last", max_length=pytorch.Batch(8))
    assert warnings_in(caplog) == [
        f"The hparams differ from those of checkpoint {checkpoint}: lr, depth, optimizer.beta, api_token, width."
    ]


def test_best_without_a_metric_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit(checkpoint_policy="best", validation_period=pytorch.Batch(2))
    (message,) = warnings_in(caplog)
    assert "every validation is followed by a checkpoint" in message


@pytest.mark.parametrize("kind", ["model", "optimizer", "lr_scheduler"])
def test_wrapping_in_train_batch_fails(kind: str, tmp_path: Path) -> None:
    class Wraps(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            mode = pytorch.LRScheduler.StepMode.MANUAL_STEP
            scheduler = torch.optim.lr_scheduler.StepLR(self.sgd, 1)
            parts: dict[str, Any] = {"model": [self.head], "optimizer": [self.sgd], "lr_scheduler": [scheduler, mode]}
            getattr(self.context, f"wrap_{kind}")(*parts[kind])

    with pytest.raises(errors.InvalidExperimentException, match=rf"wrap_{kind}\(\) was called while the trial is"):
        fit(Wraps, checkpoint_storage=tmp_path)
    assert CheckpointStorage(tmp_path).list_ids() == []


def test_wrapping_between_two_runs() -> None:
    with pytorch.init(enable_tensorboard_logging=False) as context:
        trial = SmallTrial(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        trainer.fit(max_length=pytorch.Batch(2), checkpoint_policy="none", checkpoint_storage="storage")
        context.wrap_model(torch.nn.Linear(1, 1))
        trainer.fit(max_length=pytorch.Batch(2), checkpoint_policy="none", checkpoint_storage="storage")
    assert len(context.models) == 3
