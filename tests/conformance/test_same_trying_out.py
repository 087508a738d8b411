"""One batch of a trial, tried out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.sides import SIDES, Trace, assert_same, recorded, seed
from tests.conformance.trials import Basic

CONFIG = {"hyperparameters": {"global_batch_size": 4}, "data": {"folder": "images"}, "searcher": {"metric": "loss"}}


def tried_out(side: str, trial: type[Basic]) -> Trace:
    trace = Trace()
    trial_class = recorded(trial, importlib.import_module(f"{side}.pytorch"), trace)
    seed(3)
    importlib.import_module(f"{side}.experimental").test_one_batch(trial_class, CONFIG)
    return trace


@pytest.mark.filterwarnings("ignore")
def test_one_batch_goes_the_whole_way() -> None:
    class Configured(Basic):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            assert context.get_per_slot_batch_size() == 4
            assert context.get_data_config() == {"folder": "images"}

    real, ours = (tried_out(side, Configured) for side in SIDES)
    # Ours has the configuration before the trial is built, and so does what it saves.
    for trace in (real, ours):
        trace.checkpoints[0].pop("load_data")
    assert_same(real, ours)
    assert len(ours.named("train_batch")) == 1


def test_nothing_is_left_behind() -> None:
    before = set(Path.cwd().iterdir())
    tried_out("det_lightning", Basic)
    assert set(Path.cwd().iterdir()) == before


@pytest.mark.parametrize("side", SIDES)
def test_errors_of_a_trial_come_out(side: str) -> None:
    class Fails(Basic):
        def evaluate_batch(self, batch: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tried_out(side, Fails)
