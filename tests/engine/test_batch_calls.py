"""How many Python calls of ours, and through how many of our files, one batch makes: a number that no clock decides."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from det_lightning.core._tensorboard import TensorBoardOutput
from tests.trials import fit_trial, make_data

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = tuple(f"{ROOT / package}/" for package in ("det_lightning", "adapters", "callbacks"))


class CallRecorder:
    """Notes the calls of functions of ours, as ``(file, function)``, while it records."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.finished: list[list[tuple[str, str]]] = []
        self.batch_code: CodeType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call":
            if code is TrialModule.training_step.__code__:
                self.calls = []  # what Lightning and its hooks do between steps belongs to no batch
            if code.co_filename.startswith(OURS):
                self.calls.append((Path(code.co_filename).name, code.co_name))
        elif event == "return" and code is self.batch_code:
            self.finished.append(self.calls)
            self.calls = []


def profiled(recorder: Callable[[FrameType, str, Any], None], run: Callable[[], Any]) -> None:
    gc.collect()  # not meanwhile: ending the generators of an earlier run calls them
    before = sys.getprofile()
    sys.setprofile(recorder)
    try:
        run()
    finally:
        sys.setprofile(before)


class PlainTrial(pytorch.PyTorchTrial):
    """One model and one optimizer; shows a recorder the function that calls ``train_batch``, and marks its batches."""

    def __init__(
        self, context: pytorch.PyTorchTrialContext, recorder: CallRecorder, mark: Callable[[], None] = lambda: None
    ) -> None:
        self.context = context
        self.recorder = recorder
        self.mark = mark
        self.model = context.wrap_model(torch.nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.recorder.batch_code = sys._getframe(1).f_code
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        self.mark()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {}


class ValidatedTrial(PlainTrial):
    """Shows a recorder what is called between the ends of two of its ``evaluate_batch``."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        self.recorder.batch_code = sys._getframe(0).f_code
        return {"validation_loss": loss}


def calls_of_each_batch(trial: type[PlainTrial], batches: int) -> list[list[tuple[str, str]]]:
    """Return the calls of each batch of a run, a validation of which follows the last.

    The calls of a batch begin at the end of the one before, or with the step.
    """
    recorder = CallRecorder()
    length, period = pytorch.Batch(batches), pytorch.Batch(4)
    train = functools.partial(fit_trial, functools.partial(trial, recorder=recorder))
    profiled(recorder, lambda: train(max_length=length, reporting_period=period))
    return recorder.finished


def test_a_batch_makes_few_calls() -> None:
    batches = calls_of_each_batch(PlainTrial, 8)
    assert len(batches) == 8
    fewest = min(batches, key=len)
    assert len(fewest) <= 8, fewest
    assert len({file for file, _ in fewest}) <= 6, fewest
    first, *others = batches  # reports are made within a step
    assert ("module.py", "training_step") in first
    assert not [calls for calls in others if ("module.py", "training_step") in calls]
    assert [calls for calls in others if ("run.py", "end_workload") in calls]


def test_a_validation_batch_makes_few_calls() -> None:
    first, _, third, *_ = calls_of_each_batch(ValidatedTrial, 1)
    assert len(first) > len(third)
    assert third == [("metrics.py", "add"), ("_data.py", "move")]


def test_tensorboard_takes_one_call_a_metric(tmp_path: Path) -> None:
    recorder = CallRecorder()
    output = TensorBoardOutput(enabled=True, locate=lambda: tmp_path)
    batch = {"loss": np.array(0.5, np.float32)}
    output.add_training(1, {}, [batch])
    profiled(recorder, lambda: output.add_training(1001, {}, [batch] * 1000))
    assert len(recorder.calls) <= 1030, recorder.calls[:20]


@pytest.mark.parametrize("aggregation_frequency", [1, 2])
def test_float32_has_no_layer_below_the_context(aggregation_frequency: int) -> None:
    recorder = CallRecorder()
    context = pytorch.PyTorchTrialContext(aggregation_frequency=aggregation_frequency)
    model = context.wrap_model(torch.nn.Linear(2, 1))
    optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    context.position.batch_idx = aggregation_frequency - 1
    loss = model(torch.ones(4, 2, device=context.device)).sum()

    def train() -> None:
        context.backward(loss)
        context.step_optimizer(optimizer)

    profiled(recorder, train)
    assert [call for call in recorder.calls if call[1] in ("backward", "step_optimizer", "step")] == [
        ("_pytorch_context.py", "backward"),
        ("backend.py", "backward"),
        ("_pytorch_context.py", "step_optimizer"),
        ("backend.py", "step"),
    ]
    assert aggregation_frequency > 1 or len(recorder.calls) == 4


def fewest_calls_of_a_batch(train: Callable[[Callable[[], None]], None]) -> int:
    """Return the calls of Python functions, of anybody's, between two of those that ``train`` makes of its argument."""
    counts = [0]

    def count(frame: FrameType, event: str, _: Any) -> None:
        counts[-1] += event == "call"

    profiled(count, lambda: train(lambda: counts.append(0)))
    return min(counts[2:-1])


def test_fewer_calls_than_a_plain_loop() -> None:
    def train_plainly(mark: Callable[[], None]) -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for inputs, targets in torch.utils.data.DataLoader(make_data(), batch_size=4):
            loss = (model(inputs) - targets).square().mean()
            mark()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def train_trial(mark: Callable[[], None]) -> None:
        make_trial = functools.partial(PlainTrial, recorder=CallRecorder(), mark=mark)
        fit_trial(make_trial, max_length=pytorch.Batch(8))

    assert fewest_calls_of_a_batch(train_trial) < fewest_calls_of_a_batch(train_plainly)
