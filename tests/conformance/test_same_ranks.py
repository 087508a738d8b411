"""Two processes of the real determined beside two of ours: batches, metrics, events and weights, equal to the bit."""

from __future__ import annotations

import pytest

from tests.conformance.ranks import Case, run_ranks
from tests.conformance.sides import SIDES, Trace, assert_same

PERIODS = {"max_length": ["Batch", 9], "validation_period": ["Batch", 4], "checkpoint_period": ["Batch", 5]}

EQUAL: dict[str, Case] = {
    "basic": ("Basic", PERIODS),
    "epochs": ("Drawing", {"max_length": ["Epoch", 2], "reporting_period": ["Batch", 2]}),
    "full dataset": ("FullDataset", PERIODS),
    "uneven validation": ("Uneven", PERIODS),
    "fewer batches than ranks": ("OneBatch", PERIODS),
    "reducers": ("Reducing", PERIODS),
    "step zero": ("Basic", {**PERIODS, "step_zero_validation": True}),
    "test mode": ("Basic", {"max_length": ["Batch", 9], "test_mode": True}),
}
UNEQUAL: dict[str, Case] = {
    "two backward passes": ("Adversarial", {"max_length": ["Batch", 4]}),
    "aggregation": ("Basic", {"max_length": ["Batch", 8], "init": {"aggregation_frequency": 4}}),
}

Runs = dict[str, dict[str, list[Trace]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What happened in every case, by side and case, on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data_home"))
        patch.chdir(tmp_path_factory.mktemp("working_directory"))
        return {side: run_ranks(side, {**EQUAL, **UNEQUAL}, folder / side) for side in SIDES}


@pytest.mark.parametrize("case", EQUAL)
def test_two_ranks_of_either_train_the_same(runs: Runs, case: str) -> None:
    real, ours = (runs[side][case] for side in SIDES)
    for theirs, mine in zip(real, ours, strict=True):
        assert_same(theirs, mine)


def test_ranks_stay_equal_where_determined_fails(runs: Runs) -> None:
    """Knowingly better: of two backward passes after one round of forward passes the real one averages the first."""
    real, ours = (runs[side]["two backward passes"] for side in SIDES)
    assert real[0].final["weights"] != real[1].final["weights"]
    assert ours[0].final["weights"] == ours[1].final["weights"]


def test_aggregation_is_the_same_but_for_rounding(runs: Runs) -> None:
    """Knowingly different in the last bits: the real one exchanges gradients on batches without an update too."""
    real, ours = (runs[side]["aggregation"] for side in SIDES)
    assert ours[0].final["weights"] == ours[1].final["weights"]
    batches = [[entry[:3] for entry in trace.named("train_batch")] for trace in (real[0], ours[0])]
    assert batches[0] == batches[1]
    real_losses, our_losses = (
        [float.fromhex(averages["loss"][1]) for _, averages, _ in trace.named("on_training_workload_end")]
        for trace in (real[0], ours[0])
    )
    assert our_losses == pytest.approx(real_losses, rel=1e-5)
