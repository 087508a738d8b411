"""Two processes under either Trainer: the same weights on every rank, and those of one process on all of the data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from det_lightning.checkpoint import load_checkpoint
from tests.distributed.ranks import DDP_SCENARIOS, SCENARIOS
from tests.distributed.trained import TOLERANCE, checkpoint_in, last_weights, results
from tests.versions import needs_shards

pytestmark = pytest.mark.slow

TRAININGS = [
    *((scenario, "trial_ddp") for scenario in DDP_SCENARIOS),
    *(pytest.param(scenario, "trial_fsdp", marks=needs_shards) for scenario in SCENARIOS),
]


@pytest.mark.parametrize(("scenario", "strategy"), TRAININGS)
def test_two_ranks_are_one_with_twice_the_batch(folder: Path, scenario: str, strategy: str) -> None:
    """Both have the same weights after every update."""
    first, second = results(folder, f"{scenario}-{strategy}")
    assert len(first["updates"]) > 2
    torch.testing.assert_close(first["updates"], second["updates"], rtol=0, atol=0)
    if scenario != "random":  # one process draws other numbers
        torch.testing.assert_close(first["updates"][-1], last_weights(folder, f"{scenario}-one"), **TOLERANCE)


@pytest.mark.parametrize("name", ["lightning", "lightning-ddp", "lightning-options"])
def test_lightnings_launcher_trains_the_same(folder: Path, name: str) -> None:
    """``pl.Trainer(strategy="trial_ddp", devices=2)`` in a script, without torchrun; also ``"ddp"``, and options."""
    lightning, torchrun = results(folder, name), results(folder, "plain-trial_ddp")
    for ours, theirs in zip(lightning, torchrun, strict=True):
        assert torch.equal(ours["updates"][-1], theirs["updates"][-1])


@pytest.mark.parametrize(("run", "batches"), [("each-batch", 3), ("many-batches", 3), ("limited", 2)])
def test_the_chief_sets_the_epoch_length(folder: Path, run: str, batches: int) -> None:
    first, second = results(folder, run)
    for rank in (first, second):
        assert rank["epochs"] == [0, 1, 2]
        assert len(rank["updates"]) == 3 * batches
        assert rank["seen"] == ([] if run == "many-batches" else [[*range(batches)] * 3])
    assert torch.equal(first["updates"][-1], second["updates"][-1])


def test_a_stop_that_one_rank_asks_for_ends_all(folder: Path) -> None:
    assert [len(rank["updates"]) for rank in results(folder, "stopped")] == [4, 4]


@pytest.mark.parametrize(
    ("scenario", "strategy", "updates"),
    [
        ("random", "trial_ddp", 7),
        ("aggregated", "trial_ddp", 3),
        pytest.param("random", "trial_fsdp", 7, marks=needs_shards),
    ],
)
def test_resumed_run_ends_the_same(folder: Path, scenario: str, strategy: str, updates: int) -> None:
    resumed, straight = (results(folder, f"{scenario}-{strategy}{more}") for more in (f"-{strategy}", ""))
    for ours, theirs in zip(resumed, straight, strict=True):
        assert len(ours["updates"]) == updates
        assert torch.equal(ours["updates"][-1], theirs["updates"][-1])


def test_one_process_goes_on_where_two_stopped(folder: Path) -> None:
    (resumed,) = results(folder, "continued-by-one", ranks=1)
    # A batch of two ranks is one of one rank: the global batch is the same.
    assert resumed["first_batch"] == 5


def test_checkpoint_has_all_random_states(folder: Path) -> None:
    content = load_checkpoint(checkpoint_in(folder, "plain-trial_ddp-storage"))
    assert content.resume is not None
    states = [entry["cpu_rng_state"] for entry in content.resume.rng_states]
    assert len(states) == 2
    assert (content.resume.settings or {})["hparams"] == {"global_batch_size": 8}
