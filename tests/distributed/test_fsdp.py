"""Two processes with sharded models, under either Trainer: the weights of one process, and of replicated models."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.checkpoint import load_checkpoint
from tests.launching import TORCHRUN, environment
from tests.versions import needs_shards
from tests.warm_python import start_warm_python

pytestmark = [pytest.mark.slow, needs_shards]

#: How far sums of floats may be apart that were added in another order.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
SCENARIOS = ("plain", "aggregated", "gan", "orders", "frozen", "clipped", "unused", "leftover")
#: Weights of the large model and two states of its optimizer, each a float32 for a weight.
LARGE_STATE_BYTES = 3 * 4 * (16 * 1024**2 + 6 * 1024 + 1)


def launch(command: str, folder: Path, ranks: int = 2, torchrun: bool = True) -> None:
    """Run ``tests.distributed.fsdp_ranks`` on several ranks."""
    launcher = [*TORCHRUN[:-1], str(ranks)] if torchrun else []
    program = ["-m", "tests.distributed.fsdp_ranks", command, str(folder)]
    arguments = [start_warm_python().executable, *launcher, *program]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]


def write_real_checkpoint(folder: Path) -> None:
    """Let the real determined train a trial, and keep its ``state_dict.pth``."""
    from tests.conformance.sides import run
    from tests.conformance.trials import Basic

    run("determined", Basic, max_length=5, checkpoint_policy="none")
    (written,) = Path(os.environ["XDG_DATA_HOME"]).glob("determined/*/state_dict.pth")
    written.rename(folder / "real.pth")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every scenario of ``tests.distributed.fsdp_ranks`` left behind."""
    found = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("working_directory"))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data_home")))
        launch("two", found)
        launch("one", found, ranks=1)
        launch("load", found)
        launch("lightning", found, torchrun=False)
    return found


def results(folder: Path, name: str, ranks: int = 2) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(ranks)]


def last_weights(folder: Path, name: str) -> torch.Tensor:
    weights: torch.Tensor = results(folder, name, ranks=1)[0]["updates"][-1]
    return weights


def state_in(folder: Path, name: str) -> dict[str, Any]:
    (metadata,) = (folder / name).glob("*/metadata.json")
    return load_checkpoint(metadata.parent).state


@pytest.mark.parametrize("scenario", [*SCENARIOS, "random", "uneven", "full"])
def test_weights_stay_equal_on_all_ranks(folder: Path, scenario: str) -> None:
    first, second = results(folder, f"{scenario}-trial_fsdp")
    assert len(first["updates"]) == len(second["updates"]) > 2
    for ours, theirs in zip(first["updates"], second["updates"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_are_one_with_twice_the_batch(folder: Path, scenario: str) -> None:
    two, one = last_weights(folder, f"{scenario}-trial_fsdp"), last_weights(folder, f"{scenario}-one")
    torch.testing.assert_close(two, one, **TOLERANCE)


@pytest.mark.parametrize("scenario", [*(s for s in SCENARIOS if s != "unused"), "random", "uneven", "full"])
def test_shards_train_as_replicas_do(folder: Path, scenario: str) -> None:
    """Also with other weights on each rank to begin with, dropout, and validations that take ranks unequally long."""
    sharded, replicated = (results(folder, f"{scenario}-{kind}") for kind in ("trial_fsdp", "trial_ddp"))
    for ours, theirs in zip(sharded, replicated, strict=True):
        torch.testing.assert_close(ours["updates"][-1], theirs["updates"][-1], **TOLERANCE)
        torch.testing.assert_close(ours["buffers"], theirs["buffers"], **TOLERANCE)


def test_finer_units_train_the_same(folder: Path) -> None:
    torch.testing.assert_close(last_weights(folder, "units"), last_weights(folder, "gan-trial_fsdp"), **TOLERANCE)


def test_resumed_run_ends_the_same(folder: Path) -> None:
    for resumed, straight in zip(results(folder, "fsdp-fsdp"), results(folder, "random-trial_fsdp"), strict=True):
        assert len(resumed["updates"]) == 7
        assert torch.equal(resumed["updates"][-1], straight["updates"][-1])


@pytest.mark.parametrize("resumed", ["fsdp-ddp", "ddp-fsdp"])
def test_a_run_goes_on_under_the_other_strategy(folder: Path, resumed: str) -> None:
    torch.testing.assert_close(last_weights(folder, resumed), last_weights(folder, "plain-trial_fsdp"), **TOLERANCE)


@pytest.mark.parametrize("resumed", ["fsdp-fsdp", "fsdp-ddp", "ddp-fsdp"])
def test_resume_within_an_aggregation(folder: Path, resumed: str) -> None:
    """Gradients of the batches before are saved as their average over ranks; the last bits may differ."""
    again, straight = (last_weights(folder, f"aggregated-{name}") for name in (resumed, "trial_fsdp"))
    torch.testing.assert_close(again, straight, **TOLERANCE)


def test_a_checkpoint_is_that_of_one_process(folder: Path) -> None:
    two, one = state_in(folder, "gan-trial_fsdp-storage"), state_in(folder, "gan-one-storage")
    for key in ("models_state_dict", "optimizers_state_dict"):
        torch.testing.assert_close(two[key], one[key], **TOLERANCE)


def test_whole_checkpoint_loads_into_shards(folder: Path) -> None:
    reloaded = torch.load(folder / "reloaded.pt", weights_only=True)
    written = state_in(folder, "gan-one-storage")
    for key, states in reloaded.items():
        torch.testing.assert_close(states, written[key], rtol=0, atol=0)


def test_unfit_weights_are_refused(folder: Path) -> None:
    for rank in range(2):
        message = (folder / f"wrong-{rank}.txt").read_text()
        assert "size mismatch for weight" in message
        assert "torch.Size([2, 2])" in message


def test_checkpoint_needs_no_second_copy(folder: Path) -> None:
    """Written in the background, too, which copies the state of models that are not sharded."""
    chief, other = (checks["peak"] - checks["before"] for checks in results(folder, "checks"))
    assert chief < 1.6 * LARGE_STATE_BYTES
    assert other < 0.25 * LARGE_STATE_BYTES


def test_replaced_parameters_are_refused(folder: Path) -> None:
    for checks in results(folder, "checks"):
        optimizer, model = checks["refused"]
        assert "2 of 2 parameters of the SGD belong to no wrapped model" in optimizer
        assert "share parameters: wrap one module" in model


def test_ranks_agree_on_an_overflow(folder: Path) -> None:
    assert [checks["scale"] for checks in results(folder, "checks")] == [2.0, 2.0]


@pytest.mark.parametrize("name", ["lightning", "lightning-from-file", "lightning-from-directory"])
def test_lightnings_launcher_resumes(folder: Path, name: str) -> None:
    """``pl.Trainer(strategy="trial_fsdp", devices=2)``: from its own file, and replicated from Determined's format."""
    for ours in results(folder, name):
        torch.testing.assert_close(ours["updates"][-1], last_weights(folder, "plain-trial_fsdp"), **TOLERANCE)


def reader(api: Any) -> type:
    """Return a trial of either side with the model of the scenarios."""

    class Reader(api.PyTorchTrial):
        def __init__(self, context: Any) -> None:
            self.model = context.wrap_model(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)))
            context.wrap_optimizer(torch.optim.AdamW(self.model.parameters()))

        build_training_data_loader = build_validation_data_loader = train_batch = evaluate_batch = None

    return Reader


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def test_one_process_loads_a_trial(folder: Path) -> None:
    (metadata,) = (folder / "plain-trial_fsdp-storage").glob("*/metadata.json")
    trial = pytorch.load_trial_from_checkpoint_path(metadata.parent, trial_class=reader(pytorch))
    assert torch.equal(flat_weights(trial.model), last_weights(folder, "plain-trial_fsdp"))


@pytest.mark.determined
def test_determined_and_ours_read_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "ranks").mkdir()
    (working_directory := tmp_path / "working_directory").mkdir()
    monkeypatch.chdir(working_directory)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data_home"))
    write_real_checkpoint(folder)
    launch("real", folder)
    real = importlib.import_module("determined.pytorch")
    (metadata,) = (folder / "plain-trial_fsdp-storage").glob("*/metadata.json")
    trial = real.load_trial_from_checkpoint_path(
        # It cannot load on today's torch without the last argument.
        str(metadata.parent),
        trial_class=reader(real),
        torch_load_kwargs={"weights_only": False},
    )
    assert torch.equal(flat_weights(trial.model), last_weights(folder, "plain-trial_fsdp"))
    reloaded = torch.load(folder / "reloaded-real.pt", weights_only=True)
    written = torch.load(folder / "real.pth", weights_only=False)
    for key, states in reloaded.items():
        torch.testing.assert_close(states, written[key], rtol=0, atol=0)
