"""Batches on their way to a GPU, copied beside its work and none taken early; and the workers that load them."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from det_lightning.engine.loaders import SideStream, copy_aside
from det_lightning.pytorch._random_state import PassJournal
from tests.lightning import trainer
from tests.trials import SmallTrial, fit_trial, make_data

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


# Workers end with the run, not when garbage is collected


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Wrapper:
    """A loader of a user's own, around one of torch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader


def ours(persistent: bool = True) -> Any:
    return pytorch.DataLoader(make_data(), batch_size=8, num_workers=1, persistent_workers=persistent)


def torchs(persistent: bool = True) -> Any:
    return torch.utils.data.DataLoader(make_data(), batch_size=8, num_workers=1, persistent_workers=persistent)


def users(persistent: bool = True) -> Any:
    return Wrapper(torchs(persistent))


class WithWorkers(SmallTrial):
    make_loader = staticmethod(ours)
    persistent = True
    fails = False
    seen = 0

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self) -> Any:
        return self.make_loader(self.persistent)

    build_validation_data_loader = build_training_data_loader

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.seen = len(multiprocessing.active_children())
        if self.fails:
            raise ValueError("while validating")
        return super().evaluate_batch(batch)


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "of a pass"])
@pytest.mark.parametrize("make_loader", [ours, torchs, users])
def test_workers_end_with_fit(make_loader: Any, persistent: bool) -> None:
    loaders = {"make_loader": staticmethod(make_loader), "persistent": persistent}
    assert fit_trial(type("Varied", (WithWorkers,), loaders)).seen == 2
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "of a pass"])
def test_workers_end_despite_a_kept_traceback(persistent: bool) -> None:
    with pytest.raises(ValueError, match="while validating") as kept:
        fit_trial(type("Fails", (WithWorkers,), {"fails": True, "persistent": persistent}))
    assert multiprocessing.active_children() == []
    del kept


def test_workers_end_with_each_call_of_lightning() -> None:
    module, made = TrialModule(WithWorkers), trainer()
    for run in (made.fit, made.validate):
        run(module)
        assert module.trial.seen > 0
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("iterated_before", [False, True])
def test_a_kept_loader_can_be_iterated_again(iterated_before: bool) -> None:
    class Keeps(WithWorkers):
        def build_validation_data_loader(self) -> Any:
            return kept

    kept = torchs()
    if iterated_before:
        list(kept)
    before = multiprocessing.active_children()  # these live on
    assert len(before) == iterated_before
    for _ in range(2):
        fit_trial(Keeps)
        assert multiprocessing.active_children() == before
    assert len(list(kept)) == len(kept)
    kept._iterator = None
