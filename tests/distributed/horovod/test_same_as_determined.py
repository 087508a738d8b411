"""Two processes of the real determined on Horovod beside two of ours: equal to the bit but for a hidden step."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest

from tests.conformance.sides import SIDES, Trace, assert_same
from tests.distributed.horovod.conftest import Launch

pytestmark = pytest.mark.slow

pytest.importorskip("determined", reason="the real determined is not installed; run tox -e horovod")

PERIODS = {"max_length": ["Batch", 9], "validation_period": ["Batch", 4], "checkpoint_period": ["Batch", 5]}

EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "basic": ("Basic", PERIODS),
    "epochs": ("Drawing", {"max_length": ["Epoch", 2], "reporting_period": ["Batch", 2]}),
    "uneven validation": ("Uneven", PERIODS),
    "reducers": ("Reducing", PERIODS),
    "aggregation": ("Basic", {"max_length": ["Batch", 8], "init": {"aggregation_frequency": 4}}),
}
HIDDEN_STEP: tuple[str, dict[str, Any]] = ("Basic", {**PERIODS, "hidden_step": True})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> dict[str, dict[str, list[Trace]]]:
    """What happened in every case, by side and case, on each of two ranks."""
    folder = tmp_path_factory.mktemp("sides")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data_home"))
        patch.chdir(tmp_path_factory.mktemp("working_directory"))
        for side in SIDES:
            output = folder / side
            output.mkdir()
            cases = json.dumps({**EQUAL, "hidden step": HIDDEN_STEP})
            launch("tests.distributed.horovod.determined_ranks", side, cases, str(output))
            per_rank = [pickle.loads((output / f"{rank}.pkl").read_bytes()) for rank in range(2)]
            found[side] = {name: [traces[name] for traces in per_rank] for name in per_rank[0]}
    return found


@pytest.mark.parametrize("case", EQUAL)
def test_two_ranks_of_either_train_the_same(runs: dict[str, dict[str, list[Trace]]], case: str) -> None:
    real, ours = (runs[side][case] for side in SIDES)
    for theirs, mine in zip(real, ours, strict=True):
        assert_same(theirs, mine)


def test_there_is_no_step_before_the_first(runs: dict[str, dict[str, list[Trace]]]) -> None:
    """Knowingly better: the real one begins with a step on gradients of zero, which Adam and weight decay feel."""
    real, ours = (runs[side]["hidden step"][0].final["optimizers"] for side in SIDES)
    steps = [optimizers[1]["state"][0]["step"] for optimizers in (real, ours)]
    assert [float(np.frombuffer(bytes.fromhex(step[3]), np.float32)[0]) for step in steps] == [10, 9]
