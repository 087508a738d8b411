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
from tests.adapters.training import Trial, loader, loss_of, make_model
from tests.trials import fit_trial


def profiled(recorder: Callable[[FrameType, str, Any], None], run: Callable[[], Any]) -> None:
    gc.collect()  # not meanwhile: ending the generators of an earlier run calls them
    before = sys.getprofile()
    sys.setprofile(recorder)
    try:
        run()
    finally:
        sys.setprofile(before)


class PlainTrial(Trial):
    """Marks its batches."""

    def __init__(self, context: pytorch.PyTorchTrialContext, mark: Callable[[], None] = lambda: None) -> None:
        super().__init__(context)
        self.mark = mark

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.mark()
        return super().train_batch(batch, epoch_idx, batch_idx)


def fewest_calls_of_a_batch(train: Callable[[Callable[[], None]], None]) -> int:
    """Return the calls of Python functions, of anybody's, between two of those that ``train`` makes of its argument."""
    counts = [0]

    def count(frame: FrameType, event: str, _: Any) -> None:
        counts[-1] += event == "call"

    profiled(count, lambda: train(lambda: counts.append(0)))
    return min(counts[2:-1])


def test_fewer_calls_than_a_plain_loop() -> None:
    def train_plainly(mark: Callable[[], None]) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in loader():
            mark()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def train_trial(mark: Callable[[], None]) -> None:
        fit_trial(functools.partial(PlainTrial, mark=mark), max_length=pytorch.Batch(8))

    assert fewest_calls_of_a_batch(train_trial) < fewest_calls_of_a_batch(train_plainly)
