"""Two processes of the real Horovod, beside one process on all of the data and beside two of DDP; also apex levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.horovod.conftest import Launch
from tests.distributed.horovod.levels import LEVELS
from tests.distributed.horovod.scenarios import SCENARIOS
from tests.distributed.trained import TOLERANCE, results
from tests.precision.test_precision_ranks import TOLERANCE as LEVELS_TOLERANCE

pytestmark = pytest.mark.slow

#: How far sums may be apart of gradients that were rounded to half precision; 1e-4 was seen.
COMPRESSED: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-3}

MODULE = "tests.distributed.horovod.ranks"


def last_updates(folder: Path, name: str) -> torch.Tensor:
    """Return the weights after the last update; they have to be the same on both ranks."""
    first, second = results(folder, name)
    assert len(first["updates"]) > 2
    torch.testing.assert_close(first["updates"], second["updates"], rtol=0, atol=0)
    last: torch.Tensor = first["updates"][-1]
    return last


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """What every scenario left behind: with Horovod, on one process, and with DDP."""
    found = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("working_directory"))
        launch(MODULE, "two", str(found))
        launch(MODULE, "one", str(found), launcher="none")
        launch(MODULE, "ddp", str(found), launcher="torchrun")
        launch(MODULE, "again", str(found), launcher="horovodrun")
        launch(MODULE, "lightning", str(found))
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_are_one_with_twice_the_batch(folder: Path, scenario: str) -> None:
    ours, (one,) = last_updates(folder, f"two-{scenario}"), results(folder, f"one-{scenario}", ranks=1)
    torch.testing.assert_close(ours, one["updates"][-1], **TOLERANCE)


@pytest.mark.parametrize("scenario", ["plain", "aggregated", "clipped", "gan", "frozen"])
def test_ddp_trains_the_same(folder: Path, scenario: str) -> None:
    ours, ddp = last_updates(folder, f"two-{scenario}"), last_updates(folder, f"ddp-{scenario}")
    torch.testing.assert_close(ours, ddp, **TOLERANCE)


def test_half_precision_gradients_train_nearly_the_same(folder: Path) -> None:
    compressed, plain = last_updates(folder, "compressed"), last_updates(folder, "two-plain")
    assert not torch.equal(compressed, plain)
    torch.testing.assert_close(compressed, plain, **COMPRESSED)


def test_ranks_begin_with_the_chiefs_weights(folder: Path) -> None:
    assert torch.equal(last_updates(folder, "unequal"), last_updates(folder, "two-plain"))


def test_gradients_are_exchanged_on_updates_only(folder: Path) -> None:
    for rank in range(2):
        exchanged = torch.load(folder / f"exchanged-{rank}.pt")
        # 12 batches, of which every third updates 4 parameters.
        assert len(exchanged) == 4 * 4
        assert set(exchanged) == {"model0.0.weight", "model0.0.bias", "model0.1.weight", "model0.1.bias"}


def test_resumed_run_ends_the_same(folder: Path) -> None:
    assert torch.equal(last_updates(folder, "resumed"), last_updates(folder, "two-plain"))


def test_resume_within_an_aggregation_is_exact(folder: Path) -> None:
    assert torch.equal(last_updates(folder, "resumed-aggregation"), last_updates(folder, "two-aggregated"))


@pytest.mark.parametrize("name", ["horovod-from-ddp", "ddp-from-horovod"])
def test_either_resumes_from_the_other(folder: Path, name: str) -> None:
    torch.testing.assert_close(last_updates(folder, name), last_updates(folder, "two-plain"), **TOLERANCE)


def test_one_process_resumes_from_two(folder: Path) -> None:
    (resumed,) = results(folder, "on", ranks=1)
    # A batch of two ranks is one of one rank: the global batch is the same.
    assert resumed["first_batch"] == 5


def test_torchmetrics_cover_all_ranks(folder: Path) -> None:
    (first, second), (one,) = results(folder, "two-error"), results(folder, "one-error", ranks=1)
    assert first == second
    assert first["error"] == pytest.approx(one["error"], rel=1e-5)


def test_lightnings_strategy_trains_the_same(folder: Path) -> None:
    assert torch.equal(last_updates(folder, "lightning"), last_updates(folder, "two-clipped"))


def test_a_checkpoint_of_lightnings_is_loaded(folder: Path) -> None:
    saved, loaded = results(folder, "lightning"), results(folder, "validated")
    assert [entry["metrics"] for entry in loaded] == [entry["metrics"] for entry in saved]


def test_collectives_of_the_strategy_reduce_gather_and_broadcast(folder: Path) -> None:
    for found in results(folder, "collectives"):
        assert found["mean"].tolist() == [0.5, 3.0]
        assert found["sum"].tolist() == [1, 6]
        assert (found["max"].tolist(), found["max"].dtype) == ([1.0, 3.0], torch.bfloat16)
        assert (found["any"], found["all"]) == (True, False)
        assert found["gathered"].tolist() == [[0, 3], [1, 3]]
        assert found["scalars"].tolist() == [0, 1]
        assert found["broadcast"] == {"of": 0}


def test_an_exception_on_one_rank_ends_the_job(tmp_path: Path, launch: Launch) -> None:
    assert "a mistake on rank 1" in launch(MODULE, "raises", str(tmp_path), fails=True)


def test_too_many_backward_passes_are_named(tmp_path: Path, launch: Launch) -> None:
    printed = launch(MODULE, "mixes", str(tmp_path), fails=True)
    assert "AdamW of model1.weight, model1.bias, with backward_passes_per_step=1" in printed
    assert "context.wrap_optimizer(optimizer, backward_passes_per_step=N)" in printed
    assert "SGD" not in printed


def test_a_module_that_is_not_a_trial_is_refused(tmp_path: Path, launch: Launch) -> None:
    assert "strategy='horovod' trains a TrialModule" in launch(MODULE, "plain_module", str(tmp_path), fails=True)


@pytest.mark.parametrize("launcher", ["torchrun", "horovod"])
def test_two_launchers_at_once_are_refused(tmp_path: Path, launch: Launch, launcher: str) -> None:
    asks = {"torchrun": {"USE_HOROVOD": "1"}, "horovod": {"USE_TORCH_DISTRIBUTED": "1"}}[launcher]
    # Both would go on to train "raises" to its mistake, if they were not stopped before.
    printed = launch(MODULE, "raises", str(tmp_path), launcher=launcher, fails=True, **asks)
    assert "asks for another launcher" in printed
    assert "a mistake on rank 1" not in printed


def test_run_without_launcher_is_alone(tmp_path: Path, launch: Launch) -> None:
    printed = launch(MODULE, "lightning", str(tmp_path), launcher="none")
    assert "Horovod knows of one process only" in printed


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """What every apex level left behind, on two ranks and on one."""
    found = tmp_path_factory.mktemp("levels")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("working_directory"))
        launch("tests.distributed.horovod.levels", str(found), "2")
        launch("tests.distributed.horovod.levels", str(found), "1", launcher="none")
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_skip_an_overflow_together(levels: Path, level: str) -> None:
    first, second = results(levels, f"{level}-2")
    assert len(first["updates"]) > 3
    torch.testing.assert_close(first["updates"], second["updates"], rtol=0, atol=0)
    (one,) = results(levels, f"{level}-1", ranks=1)
    torch.testing.assert_close(first["updates"][-1], one["updates"][-1], **LEVELS_TOLERANCE)
    assert first["amp_state"] == second["amp_state"] == one["amp_state"]
    assert first["amp_state"]["loss_scaler0"]["loss_scale"] == 2.0**14
