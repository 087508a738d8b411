"""apex levels on two processes: an overflow on one rank is one of all, and the ranks never part."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning.checkpoint import load_checkpoint
from tests.launching import TORCHRUN, environment
from tests.precision.precision_ranks import RESUMED, SCENARIOS, STRATEGIES
from tests.versions import needs_shards
from tests.warm_python import start_warm_python

pytestmark = pytest.mark.slow

#: Two ranks add the gradients of half a batch each, which are rounded to bfloat16 before; 4e-3 was seen.
TOLERANCE: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2}


def results(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{ranks}-{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every scenario left behind, on two ranks and on one."""
    found = tmp_path_factory.mktemp("ranks")
    for ranks in (2, 1):
        launcher = [start_warm_python().executable, *TORCHRUN[:-1], str(ranks)]
        command = [*launcher, "-m", "tests.precision.precision_ranks", str(found)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(), cwd=found)
        assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_train_as_one(folder: Path, scenario: str) -> None:
    first, second = results(folder, scenario, 2)
    assert len(first["updates"]) == len(second["updates"]) > 3
    for ours, theirs in zip(first["updates"], second["updates"], strict=True):
        assert torch.equal(ours, theirs)
    (one,) = results(folder, scenario, 1)
    torch.testing.assert_close(first["updates"][-1], one["updates"][-1], **TOLERANCE)
    # Two overflows, and seven clean passes since.
    expected = {"loss_scaler0": {"loss_scale": 2.0**14, "unskipped": 7}}
    assert first["amp_state"] == second["amp_state"] == one["amp_state"] == expected


@pytest.mark.parametrize("scenario", RESUMED)
def test_resume_within_an_aggregation(folder: Path, scenario: str) -> None:
    for resumed, straight in zip(results(folder, f"{scenario}-resumed", 2), results(folder, scenario, 2), strict=True):
        assert torch.equal(resumed["updates"][-1], straight["updates"][-1])
        assert resumed["amp_state"] == straight["amp_state"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lightnings_precision_on_two_ranks(folder: Path, strategy: str) -> None:
    """The same as under O1, but that nothing is scaled, and no batch overflows."""
    first, second = results(folder, f"bf16-mixed-{strategy}", 2)
    assert torch.equal(first["updates"][-1], second["updates"][-1])
    assert first["updates"][-1].dtype is torch.float32
    ddp, _ = results(folder, "bf16-mixed-trial_ddp", 2)
    torch.testing.assert_close(first["updates"][-1], ddp["updates"][-1], rtol=1e-4, atol=1e-4)
    level, _ = results(folder, "O1", 2)
    # The first update is not skipped in either.
    torch.testing.assert_close(first["updates"][0], level["updates"][0], **TOLERANCE)


@needs_shards
def test_sharded_batch_norms_in_float32(folder: Path) -> None:
    sharded, replicated = (
        [torch.load(folder / f"normed-{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        for name in ("sharded", "replicated")
    )
    for ours, theirs in zip(sharded, replicated, strict=True):
        assert ours["types"] == theirs["types"] == {"torch.float32", "torch.bfloat16"}
        assert ours["amp_state"] == theirs["amp_state"]
        torch.testing.assert_close(ours["updates"][-1], theirs["updates"][-1], **TOLERANCE)


@needs_shards
def test_checkpoints_of_sharded_masters(folder: Path) -> None:
    (directory,) = (folder / "sharded").glob("*/")
    (weights,) = load_checkpoint(directory).state["models_state_dict"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32, torch.int64}
    last, _ = (torch.load(folder / f"normed-sharded-{rank}.pt", weights_only=True)["updates"][-1] for rank in (0, 1))
    trained = torch.cat([weights[name].reshape(-1) for name in weights if name.endswith(("weight", "bias"))])
    # The masters have more digits than the weights that were computed with.
    assert not torch.equal(trained, last)
    torch.testing.assert_close(trained, last, rtol=2**-8, atol=0)


@needs_shards
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("Normed", ["BatchNorm1d", "PerModelFSDPStrategy(policy=[BatchNorm1d])", "keep_batchnorm_fp32=False"]),
        ("Hasty", ["ran before the weights were cast", "right after wrap_model() and wrap_optimizer()"]),
    ],
)
def test_uncastable_shards_are_named(folder: Path, kind: str, parts: list[str]) -> None:
    for rank in (0, 1):
        message = (folder / f"refusal-{kind}-{rank}.txt").read_text()
        assert all(part in message for part in parts), message
