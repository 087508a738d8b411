"""Batches on their way to a GPU: copied beside its work, in the order of their use, and none taken early."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.engine.loaders import SideStream, copy_aside
from det_lightning.pytorch._random_state import PassJournal

COPY, WORK = 4, 10


class Timeline(SideStream):
    """A device whose work and whose copies take a known time; a mark is the time at which something ends."""

    def __init__(self) -> None:
        self.work_end = 0
        self.copy_end = 0
        self.copies: list[tuple[int, int]] = []

    def mark(self) -> int:
        return self.work_end

    def copy(self, move: Any, batch: Any, after: int) -> tuple[Any, int]:
        begin = max(self.copy_end, after)
        self.copy_end = begin + COPY
        self.copies.append((begin, self.copy_end))
        return move(batch), self.copy_end

    def hand_over(self, moved: Any, end: int) -> None:
        self.work_end = max(self.work_end, end)

    def work(self) -> tuple[int, int]:
        begin = self.work_end
        self.work_end += WORK
        return begin, self.work_end


def test_a_batch_is_copied_during_work() -> None:
    device = Timeline()
    works = [device.work() for _ in copy_aside(iter(range(5)), lambda batch: batch, device)]
    assert device.work_end == COPY + 5 * WORK  # in turn it would be 5 * (COPY + WORK)
    for (_, copy_end), (work_begin, _) in zip(device.copies, works, strict=True):
        assert copy_end <= work_begin
    # A copy begins when the work on the batch before the last is done, whose memory it may get.
    for (copy_begin, _), (_, work_end) in zip(device.copies[2:], works, strict=False):
        assert copy_begin >= work_end


def test_batches_are_taken_on_demand() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for number in itertools.count():
            taken.append(number)
            yield number

    batches = source()
    for trained in range(3):  # a step each, as Lightning takes them
        for moved in copy_aside(batches, lambda batch: batch * 10, Timeline()):
            assert moved == trained * 10
            break
        assert taken == list(range(trained + 1))


@pytest.mark.parametrize(
    ("arguments", "device", "aside"),
    [
        ({"num_workers": 2}, "cuda", True),
        ({"num_workers": 2, "prefetch": False}, "cuda", False),
        ({"num_workers": 0}, "cuda", False),
        ({"num_workers": 2}, "cpu", False),
    ],
)
def test_only_workers_batches_are_copied_aside(arguments: dict[str, Any], device: str, aside: bool) -> None:
    loader = pytorch.DataLoader(torch.utils.data.TensorDataset(torch.arange(6.0)), **arguments)
    assert loader.copies_aside(torch.device(device)) is aside
    assert loader.get_resumable_loader(PassJournal(), pins=aside).pin_memory is aside
