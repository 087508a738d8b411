"""apex levels on two processes: an overflow on one rank is one of all, and the ranks never part."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning.checkpoint import load_checkpoint
from tests.distributed.trained import last_weights, results
from tests.launching import TORCHRUN, environment
from tests.precision.precision_ranks import RESUMED, SCENARIOS, STRATEGIES
from tests.versions import needs_shards
from tests.warm_python import start_warm_python

pytestmark = pytest.mark.slow

#: Two ranks add the gradients of half a batch each, which are rounded to bfloat16 before; 4e-3 was seen.
TOLERANCE: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2}


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
    first, second = results(folder, f"{scenario}-2")
    assert len(first["updates"]) > 3
    torch.testing.assert_close(first["updates"], second["updates"], rtol=0, atol=0)
    (one,) = results(folder, f"{scenario}-1", ranks=1)
    torch.testing.assert_close(first["updates"][-1], one["updates"][-1], **TOLERANCE)
    # Two overflows, and seven clean passes since.
    expected = {"loss_scaler0": {"loss_scale": 2.0**14, "unskipped": 7}}
    assert first["amp_state"] == second["amp_state"] == one["amp_state"] == expected


@pytest.mark.parametrize("scenario", RESUMED)
def test_resume_within_an_aggregation(folder: Path, scenario: str) -> None:
    resumed, straight = (results(folder, f"{scenario}{more}") for more in ("-resumed-2", "-2"))
    for ours, theirs in zip(resumed, straight, strict=True):
        assert torch.equal(ours["updates"][-1], theirs["updates"][-1])
        assert ours["amp_state"] == theirs["amp_state"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lightnings_precision_on_two_ranks(folder: Path, strategy: str) -> None:
    """The same as under O1, but that nothing is scaled, and no batch overflows."""
    first, second = results(folder, f"bf16-mixed-{strategy}-2")
    assert torch.equal(first["updates"][-1], second["updates"][-1])
    assert first["updates"][-1].dtype is torch.float32
    ddp, _ = results(folder, "bf16-mixed-trial_ddp-2")
    torch.testing.assert_close(first["updates"][-1], ddp["updates"][-1], rtol=1e-4, atol=1e-4)
    level, _ = results(folder, "O1-2")
    # The first update is not skipped in either.
    torch.testing.assert_close(first["updates"][0], level["updates"][0], **TOLERANCE)


@needs_shards
def test_sharded_batch_norms_in_float32(folder: Path) -> None:
    sharded, replicated = (results(folder, f"normed-{name}") for name in ("sharded", "replicated"))
    for ours, theirs in zip(sharded, replicated, strict=True):
        assert ours["types"] == theirs["types"] == {"torch.float32", "torch.bfloat16"}
        assert ours["amp_state"] == theirs["amp_state"]
        torch.testing.assert_close(ours["updates"][-1], theirs["updates"][-1], **TOLERANCE)


@needs_shards
def test_checkpoints_of_sharded_masters(folder: Path) -> None:
    (directory,) = (folder / "sharded").glob("*/")
    (weights,) = load_checkpoint(directory).state["models_state_dict"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32, torch.int64}
    last = last_weights(folder, "normed-sharded")
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
