"""Two processes under either Trainer: the same weights on every rank, and those of one process on all of the data."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from tests.launching import TORCHRUN, environment
from tests.warm_python import start_warm_python

pytestmark = pytest.mark.slow

#: How far sums of floats may be apart that were added in another order.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def launch(*arguments: str, ranks: int = 2, torchrun: bool = True, fails: bool = False) -> str:
    """Run ``tests.distributed.ranks`` on several ranks; return what was printed."""
    launcher = [*TORCHRUN[:-1], str(ranks)] if torchrun else []
    command = [start_warm_python().executable, *launcher, "-m", "tests.distributed.ranks", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment())
    assert (done.returncode != 0) == fails, done.stdout + done.stderr[-6000:]
    return done.stdout + done.stderr


def results(folder: Path, name: str, ranks: int = 2) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every scenario of ``ranks.py`` left behind: on one rank, on two, and under Lightning's own launcher."""
    found = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("working_directory"))
        launch("two", str(found))
        launch("one", str(found), ranks=1)
        launch("lightning", str(found), torchrun=False)
    return found


@pytest.mark.parametrize("scenario", ["plain", "aggregated", "gan", "orders", "frozen"])
def test_ranks_are_equal_after_every_update(folder: Path, scenario: str) -> None:
    first, second = results(folder, scenario)
    assert len(first["updates"]) == len(second["updates"]) > 2
    for ours, theirs in zip(first["updates"], second["updates"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scenario", ["plain", "aggregated", "gan", "orders", "frozen"])
def test_two_ranks_are_one_with_twice_the_batch(folder: Path, scenario: str) -> None:
    (two, _), (one,) = results(folder, scenario), results(folder, f"{scenario}-one", ranks=1)
    torch.testing.assert_close(two["updates"][-1], one["updates"][-1], **TOLERANCE)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-4)


@pytest.mark.parametrize("name", ["lightning", "lightning-ddp", "lightning-options", "lightning-hook"])
def test_lightnings_launcher_trains_the_same(folder: Path, name: str) -> None:
    """``pl.Trainer(strategy="trial_ddp", devices=2)`` in a script, without torchrun; also ``"ddp"``, and options."""
    lightning, torchrun = results(folder, name), results(folder, "plain")
    for ours, theirs in zip(lightning, torchrun, strict=True):
        assert torch.equal(ours["updates"][-1], theirs["updates"][-1])


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left behind whose loaders have three batches and two."""
    found = tmp_path_factory.mktemp("uneven")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("working_directory"))
        launch("uneven", str(found), torchrun=False)
    return found


@pytest.mark.parametrize(("run", "batches"), [("each-batch", 3), ("many-batches", 3), ("limited", 2)])
def test_the_chief_sets_the_epoch_length(uneven: Path, run: str, batches: int) -> None:
    first, second = results(uneven, run)
    for rank in (first, second):
        assert rank["epochs"] == [0, 1, 2]
        assert len(rank["updates"]) == 3 * batches
        assert rank["seen"] == ([] if run == "many-batches" else [*range(batches)] * 3)
    assert torch.equal(first["updates"][-1], second["updates"][-1])


def test_validating_ranks_do_not_wait(folder: Path) -> None:
    """A model with buffers, and unequal numbers of validation batches: the ranks go on, and train alike."""
    first, second = results(folder, "buffers")
    assert len(first["updates"]) == 12
    assert torch.equal(first["updates"][-1], second["updates"][-1])


def test_a_stop_that_one_rank_asks_for_ends_all(folder: Path) -> None:
    first, second = results(folder, "stopped")
    assert (len(first["updates"]), len(second["updates"])) == (4, 4)


def test_resumed_run_ends_the_same(folder: Path) -> None:
    for resumed, straight in zip(results(folder, "resumed"), results(folder, "plain"), strict=True):
        assert torch.equal(resumed["updates"][-1], straight["updates"][-1])


def test_resume_within_an_aggregation(folder: Path) -> None:
    for resumed, straight in zip(results(folder, "resumed-aggregation"), results(folder, "aggregated"), strict=True):
        assert torch.equal(resumed["updates"][-1], straight["updates"][-1])


def test_one_process_goes_on_where_two_stopped(folder: Path) -> None:
    (resumed,) = results(folder, "continued-by-one", ranks=1)
    # Two ranks had trained on 5 batches each; that is 10 for one.
    assert resumed["first_batch"] == 10


def test_checkpoint_has_all_random_states(folder: Path) -> None:
    storage = CheckpointStorage(folder / "plain-storage")
    (checkpoint,) = storage.list_ids()
    content = load_checkpoint(folder / "plain-storage" / checkpoint)
    assert content.resume is not None
    states = [entry["cpu_rng_state"] for entry in content.resume.rng_states]
    assert len(states) == 2
    assert (content.resume.settings or {})["hparams"] == {"global_batch_size": 8}
