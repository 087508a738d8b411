"""How many Python calls one batch makes: a number that no clock decides."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from det_lightning import pytorch
from tests.trials import fit_trial, make_data


def profiled(recorder: Callable[[FrameType, str, Any], None], run: Callable[[], Any]) -> None:
    gc.collect()  # not meanwhile: ending the generators of an earlier run calls them
    before = sys.getprofile()
    sys.setprofile(recorder)
    try:
        run()
    finally:
        sys.setprofile(before)


class PlainTrial(pytorch.PyTorchTrial):
    """One model and one optimizer; marks its batches."""

    def __init__(self, context: pytorch.PyTorchTrialContext, mark: Callable[[], None] = lambda: None) -> None:
        self.context = context
        self.mark = mark
        self.model = context.wrap_model(torch.nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        self.mark()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {}


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
        make_trial = functools.partial(PlainTrial, mark=mark)
        fit_trial(make_trial, max_length=pytorch.Batch(8))

    assert fewest_calls_of_a_batch(train_trial) < fewest_calls_of_a_batch(train_plainly)
