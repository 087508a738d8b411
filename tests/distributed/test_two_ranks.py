"""Two processes under either Trainer, with copies of the models or shards: the weights of one on all of the data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from det_lightning import pytorch
from tests.distributed.ranks import DDP_SCENARIOS, LARGE_STATE_BYTES, SCENARIOS
from tests.distributed.trained import TOLERANCE, checkpoint_in, flat_weights, last_weights, reader, results, state_in
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


# Shards


@needs_shards
def test_shards_train_as_replicas_do(folder: Path) -> None:
    """With other weights on each rank to begin with, dropout, and validations that take ranks unequally long."""
    sharded, replicated = (results(folder, f"random-{kind}") for kind in ("trial_fsdp", "trial_ddp"))
    for ours, theirs in zip(sharded, replicated, strict=True):
        torch.testing.assert_close(ours["updates"][-1], theirs["updates"][-1], **TOLERANCE)
        torch.testing.assert_close(ours["buffers"], theirs["buffers"], **TOLERANCE)


@needs_shards
def test_finer_units_train_the_same(folder: Path) -> None:
    torch.testing.assert_close(last_weights(folder, "units"), last_weights(folder, "gan-trial_fsdp"), **TOLERANCE)


@needs_shards
@pytest.mark.parametrize("resumed", ["trial_fsdp-trial_fsdp", "trial_fsdp-trial_ddp", "trial_ddp-trial_fsdp"])
def test_resume_within_an_aggregation_ends_the_same(folder: Path, resumed: str) -> None:
    """Gradients of the batches before are saved as their average over ranks; the last bits may differ."""
    again, straight = (last_weights(folder, f"aggregated-{name}") for name in (resumed, "trial_fsdp"))
    torch.testing.assert_close(again, straight, **TOLERANCE)


@needs_shards
def test_a_checkpoint_is_that_of_one_process(folder: Path) -> None:
    two, one = state_in(folder, "gan-trial_fsdp-storage"), state_in(folder, "gan-one-storage")
    for key in ("models_state_dict", "optimizers_state_dict"):
        torch.testing.assert_close(two[key], one[key], **TOLERANCE)


@needs_shards
@pytest.mark.parametrize("written", ["one-storage", "sharded"])
def test_three_ranks_load_what_others_wrote(folder: Path, written: str) -> None:
    """One process a whole checkpoint, and two their shards."""
    reloaded = torch.load(folder / f"reloaded-{written}.pt", weights_only=True)
    expected = state_in(folder, f"gan-{written}")
    for key, states in reloaded.items():
        torch.testing.assert_close(states, expected[key], rtol=0, atol=0)


@needs_shards
def test_unfit_weights_are_refused(folder: Path) -> None:
    for rank in range(3):
        message = (folder / f"wrong-{rank}.txt").read_text()
        assert "size mismatch for weight" in message
        assert "torch.Size([2, 2])" in message


@needs_shards
def test_checkpoint_needs_no_second_copy(folder: Path) -> None:
    """Written in the background, too, which copies the state of models that are not sharded."""
    chief, other = (checks["peak"] - checks["before"] for checks in results(folder, "checks"))
    assert chief < 1.6 * LARGE_STATE_BYTES
    assert other < 0.25 * LARGE_STATE_BYTES


@needs_shards
def test_replaced_parameters_are_refused(folder: Path) -> None:
    for checks in results(folder, "checks"):
        optimizer, model = checks["refused"]
        assert "2 of 2 parameters of the SGD belong to no wrapped model" in optimizer
        assert "share parameters: wrap one module" in model


@needs_shards
def test_ranks_agree_on_an_overflow(folder: Path) -> None:
    assert [checks["scale"] for checks in results(folder, "checks")] == [2.0, 2.0]


@needs_shards
@pytest.mark.parametrize("name", ["lightning-from-file", "lightning-from-directory"])
def test_lightnings_launcher_resumes(folder: Path, name: str) -> None:
    """``pl.Trainer(strategy="trial_fsdp", devices=2)``: from its own file, and replicated from Determined's format."""
    for ours in results(folder, name):
        torch.testing.assert_close(ours["updates"][-1], last_weights(folder, "plain-trial_fsdp"), **TOLERANCE)


@needs_shards
def test_one_process_loads_a_trial(folder: Path) -> None:
    checkpoint = checkpoint_in(folder, "plain-trial_fsdp-storage")
    trial = pytorch.load_trial_from_checkpoint_path(checkpoint, trial_class=reader(pytorch))
    assert torch.equal(flat_weights(trial.model), last_weights(folder, "plain-trial_fsdp"))
