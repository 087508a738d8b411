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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every run left behind, on two ranks and on one. A run that failed fails only the tests that ask for it."""
    found = tmp_path_factory.mktemp("ranks")
    for ranks in (2, 1):
        launcher = [start_warm_python().executable, *TORCHRUN[:-1], str(ranks)]
        command = [*launcher, "-m", "tests.precision.precision_ranks", str(found)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(), cwd=found)
        (found / f"output-{ranks}.txt").write_text(done.stdout + done.stderr)
    return found


def left_by(folder: Path, name: str, ranks: int = 2) -> list[Any]:
    """Return what each rank of a run left behind; fail with what ended the run, if it failed."""
    failures = [path.read_text() for path in sorted(folder.glob(f"{name}-{ranks}-?.txt"))]
    assert not failures, failures[0]
    files = [folder / f"{name}-{ranks}-{rank}.pt" for rank in range(ranks)]
    assert all(file.exists() for file in files), (folder / f"output-{ranks}.txt").read_text()[-6000:]
    return [torch.load(file, weights_only=True) for file in files]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_train_as_one(folder: Path, scenario: str) -> None:
    """An overflow on a rank counts for all: there are two overflows, and seven clean passes since."""
    (first, second), (one,) = left_by(folder, scenario), left_by(folder, scenario, ranks=1)
    assert len(first["updates"]) > 3
    torch.testing.assert_close(first["updates"], second["updates"], rtol=0, atol=0)
    torch.testing.assert_close(first["updates"][-1], one["updates"][-1], **TOLERANCE)
    for left in (first, second, one):
        assert left["amp_state"] == {"loss_scaler0": {"loss_scale": 2.0**14, "unskipped": 7}}


@pytest.mark.parametrize("scenario", RESUMED)
def test_resume_within_an_aggregation_is_exact(folder: Path, scenario: str) -> None:
    resumed, straight = (left_by(folder, f"{scenario}{more}") for more in ("-resumed", ""))
    for ours, theirs in zip(resumed, straight, strict=True):
        assert torch.equal(ours["updates"][-1], theirs["updates"][-1])
        assert ours["amp_state"] == theirs["amp_state"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lightnings_precision_begins_like_level_o1(folder: Path, strategy: str) -> None:
    """The first update is not skipped in either. Later ones are: nothing is scaled here, and no batch overflows."""
    (first, second), (level, _) = left_by(folder, f"bf16-mixed-{strategy}"), left_by(folder, "O1")
    assert torch.equal(first["updates"][-1], second["updates"][-1])
    assert first["updates"][-1].dtype is torch.float32
    torch.testing.assert_close(first["updates"][0], level["updates"][0], **TOLERANCE)


@needs_shards
def test_lightnings_precision_with_shards_is_that_of_ddp(folder: Path) -> None:
    sharded, replicated = (left_by(folder, f"bf16-mixed-{strategy}")[0]["updates"][-1] for strategy in STRATEGIES)
    torch.testing.assert_close(sharded, replicated, rtol=1e-4, atol=1e-4)


@needs_shards
def test_sharded_batch_norms_stay_in_float32(folder: Path) -> None:
    sharded, replicated = (left_by(folder, f"normed-{name}") for name in ("sharded", "replicated"))
    for ours, theirs in zip(sharded, replicated, strict=True):
        assert ours["types"] == theirs["types"] == {"torch.float32", "torch.bfloat16"}
        assert ours["amp_state"] == theirs["amp_state"]
        torch.testing.assert_close(ours["updates"][-1], theirs["updates"][-1], **TOLERANCE)


@needs_shards
def test_checkpoints_of_shards_hold_float32_masters(folder: Path) -> None:
    (directory,) = (folder / "sharded").glob("*/")
    (weights,) = load_checkpoint(directory).state["models_state_dict"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32, torch.int64}
    last = left_by(folder, "normed-sharded")[0]["updates"][-1]
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
    ids=["batch norm in a shard", "forward pass before the cast"],
)
def test_uncastable_shards_are_named(folder: Path, kind: str, parts: list[str]) -> None:
    for message in left_by(folder, f"refusal-{kind}"):
        assert all(part in message for part in parts), message
