"""The worker processes of a trial's loaders end with the run, not when garbage is collected."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from tests.lightning import trainer
from tests.trials import SmallTrial, fit_trial, make_data


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
