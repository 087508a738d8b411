"""Checkpoints into which each rank writes what it holds: resumed from in any world, merged, and read without trust."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO
from typer.testing import CliRunner

from det_lightning import errors, pytorch
from det_lightning.adapters.lightning_checkpoint import DETERMINED_KEY, TrialCheckpointIO
from det_lightning.checkpoint import CheckpointReading, load_checkpoint
from det_lightning.cli.app import app
from tests.adapters.test_checkpoint_io import Payload
from tests.distributed.ranks import LARGE_STATE_BYTES
from tests.distributed.trained import TOLERANCE, checkpoint_in, flat_weights, last_weights, launch, reader, results
from tests.launching import ROOT, TORCHRUN, environment
from tests.versions import needs_shards
from tests.warm_python import start_warm_python

pytestmark = [pytest.mark.slow, needs_shards]


def test_documented_trial_resumes(tmp_path: Path) -> None:
    """Compiled without code for a processor, so that the test needs no C++ compiler."""
    sizes = {"global_batch_size": 8, "layers": 1, "width": 64, "vocabulary": 50, "length": 16, "compile": "aot_eager"}
    shutil.copy(ROOT / "docs" / "large_model.py", tmp_path)
    for batches in (4, 6):
        launcher = [start_warm_python().executable, *TORCHRUN]
        arguments = ["large_model.py", "--batches", str(batches), "--hparams", json.dumps(sizes)]
        done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, env=environment(), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    written = {load_checkpoint(path.parent).trial_state.batches_trained for path in tmp_path.glob("*/*/metadata.json")}
    assert written == {4, 6}
    state = load_checkpoint(next(tmp_path.glob("*/*/metadata.json")).parent).state
    assert {value.dtype for value in state["models_state_dict"][0].values()} == {torch.float32}


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of a sharded checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint_in(folder, "random-sharded"), tmp_path / "copied"))


def test_each_rank_writes_its_part(folder: Path) -> None:
    """A trial's callbacks see empty tensors of the whole shape, and the files of both ranks."""
    files = ".metadata __0_0.distcp __1_0.distcp index-00000.json index-00001.json state.pth"
    assert torch.load(folder / "seen-0.pt") == ["meta [6, 4]", files]
    assert torch.load(folder / "seen-1.pt") == []


@pytest.mark.parametrize("resumed", ["random-shards-trial_fsdp", "remote"])
def test_resumed_run_ends_the_same(folder: Path, resumed: str) -> None:
    """From a directory, and from a bucket that the ranks share."""
    for ours, theirs in zip(results(folder, resumed), results(folder, "random-trial_fsdp"), strict=True):
        assert len(ours["updates"]) == 7
        assert torch.equal(ours["updates"][-1], theirs["updates"][-1])


@pytest.mark.parametrize("strategy", ["trial_fsdp", "trial_ddp"])
def test_resume_within_an_aggregation_ends_the_same(folder: Path, strategy: str) -> None:
    resumed, straight = (last_weights(folder, f"aggregated-{name}") for name in (f"shards-{strategy}", "trial_fsdp"))
    torch.testing.assert_close(resumed, straight, **TOLERANCE)


@pytest.mark.parametrize("name", ["random", "aggregated", "gan"])
def test_merged_shards_equal_gathered_state(folder: Path, name: str) -> None:
    sharded = load_checkpoint(checkpoint_in(folder, f"{name}-sharded"))
    whole = load_checkpoint(checkpoint_in(folder, f"{name}-trial_fsdp-five"))
    for key in ("models_state_dict", "optimizers_state_dict"):
        torch.testing.assert_close(sharded.state[key], whole.state[key], rtol=0, atol=0)
    assert sharded.resume is not None
    assert whole.resume is not None
    torch.testing.assert_close(sharded.resume.gradients, whole.resume.gradients, rtol=0, atol=0)


def run_cli(*arguments: str | Path, ends_with: int = 0) -> str:
    """Run ``det-lightning checkpoint``; return what it printed."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    return result.output


def test_merge_writes_determineds_files(folder: Path, tmp_path: Path) -> None:
    sharded = checkpoint_in(folder, "random-sharded")
    merged = tmp_path / run_cli("merge", sharded, tmp_path).strip()
    files = {path.name for path in merged.iterdir()}
    assert files >= {"state_dict.pth", "trial_state.pkl", "load_data.json", "metadata.json", "resume.pth"}
    assert "shards" not in files
    metadata = [json.loads((path / "metadata.json").read_text()) for path in (sharded, merged)]
    assert metadata[1]["merged_from"] == sharded.name
    assert [one["steps_completed"] for one in metadata] == [5, 5]
    assert metadata[0]["trial"] == metadata[1]["trial"]
    assert "fine" in run_cli("verify", merged)
    assert "fine" in run_cli("verify", sharded)
    written, read = (load_checkpoint(path).state for path in (merged, sharded))
    torch.testing.assert_close(written["models_state_dict"], read["models_state_dict"], rtol=0, atol=0)


def test_a_whole_checkpoint_is_not_merged(folder: Path) -> None:
    printed = run_cli("merge", checkpoint_in(folder, "random-trial_fsdp-five"), ends_with=2)
    assert "is not sharded: it is in Determined's format already" in " ".join(printed.split())


def test_weights_are_exported_from_shards(folder: Path, tmp_path: Path) -> None:
    sharded = checkpoint_in(folder, "aggregated-sharded")
    run_cli("export", sharded, "--to", "weights", "-o", tmp_path / "weights.pt")
    exported = torch.load(tmp_path / "weights.pt", weights_only=True)
    trial = pytorch.load_trial_from_checkpoint_path(sharded, trial_class=reader(pytorch))
    assert torch.equal(flat_weights(trial.model), torch.cat([value.reshape(-1) for value in exported.values()]))


@pytest.mark.determined
def test_determined_and_ours_read_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two ranks have written as a whole, and in shards that were merged; and the other way round."""
    from tests.conformance.sides import load_trial, run
    from tests.conformance.trials import Basic

    run("determined", Basic, max_length=5, checkpoint_policy="none")
    (written,) = Path(os.environ["XDG_DATA_HOME"]).glob("determined/*/state_dict.pth")
    written.rename(tmp_path / "real.pth")
    launch("real", tmp_path)
    real = importlib.import_module("determined.pytorch")
    sharded = checkpoint_in(tmp_path, "aggregated-sharded")
    whole = checkpoint_in(tmp_path, "plain-trial_fsdp-storage")
    merged = tmp_path / run_cli("merge", sharded, tmp_path).strip()
    for theirs, ours in ((whole, whole), (merged, sharded)):
        trial = load_trial("determined", theirs, trial_class=reader(real))
        expected = pytorch.load_trial_from_checkpoint_path(ours, trial_class=reader(pytorch))
        assert torch.equal(flat_weights(trial.model), flat_weights(expected.model))
    reloaded = torch.load(tmp_path / "reloaded-real.pt", weights_only=True)
    by_real = torch.load(tmp_path / "real.pth", weights_only=False)
    for key, states in reloaded.items():
        torch.testing.assert_close(states, by_real[key], rtol=0, atol=0)


def replace_first_part(checkpoint: Path, value: Any) -> None:
    """Put ``value``, as ``torch.save`` writes it, where the first part of a tensor is."""
    shards = checkpoint / "shards"
    torch.save(value, shards / "__9_0.distcp")
    index = json.loads((shards / "index-00000.json").read_text())
    part = next(iter(index["parts"].values()))
    part[3:] = ["__9_0.distcp", 0, (shards / "__9_0.distcp").stat().st_size]
    (shards / "index-00000.json").write_text(json.dumps(index))
    # Whoever can exchange the files can exchange the manifest as well.
    metadata = json.loads((checkpoint / "metadata.json").read_text())
    (checkpoint / "metadata.json").write_text(json.dumps({"steps_completed": metadata["steps_completed"]}))


def test_code_in_the_files_of_a_rank_is_not_run(copied: Path, tmp_path: Path) -> None:
    attack = Payload(tmp_path / "attacked")
    (copied / "shards" / ".metadata").write_bytes(pickle.dumps(attack))
    replace_first_part(copied, attack)
    with pytest.raises(errors.UnsafeCheckpointError, match=r"__9_0.distcp at byte 0 refers to"):
        load_checkpoint(copied)
    assert not attack.made.exists()


@pytest.mark.parametrize("wrong", [torch.ones(2, 4), torch.ones(3, 4, dtype=torch.float64), {"a": 1}])
def test_wrong_part_is_refused(copied: Path, wrong: Any) -> None:
    replace_first_part(copied, wrong)
    with pytest.raises(errors.IncompleteCheckpointError, match="must hold"):
        load_checkpoint(copied)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("index-00001.json", r"do not make up a tensor of the shape \[6, 4\]"),
        ("__1_0.distcp", r"__1_0.distcp"),
        ("index-*.json", r"has no index-\*\.json"),  # torch's pickled index is not used
    ],
)
def test_missing_files_are_noticed(copied: Path, missing: str, message: str) -> None:
    for file in (copied / "shards").glob(missing):
        file.unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match=message):
        load_checkpoint(copied)


def test_repeated_bytes_are_refused(copied: Path) -> None:
    index = copied / "shards" / "index-00000.json"
    content = json.loads(index.read_text())
    part = next(iter(content["parts"].values()))
    index.write_text(json.dumps({**content, "parts": {f"state.{number}": part for number in range(10_000)}}))
    message = r"__0_0.distcp must be a file of at least .* bytes; got"
    with pytest.raises(errors.IncompleteCheckpointError, match=message):
        load_checkpoint(copied)


def test_flipped_bit_in_a_part_is_noticed(copied: Path) -> None:
    file = copied / "shards" / "__0_0.distcp"
    index = json.loads((copied / "shards" / "index-00000.json").read_text())
    name, part = next((n, p) for n, p in index["parts"].items() if n.startswith("state.models_state_dict.0.0"))
    content = bytearray(file.read_bytes())
    key = name.removeprefix("state.models_state_dict.0.")
    weight = load_checkpoint(copied).state["models_state_dict"][0][key]
    position = content.index(weight[:1].contiguous().numpy().tobytes(), part[4])
    content[position] ^= 1
    file.write_bytes(content)
    stored = load_checkpoint(copied, in_parts=True).state["models_state_dict"][0]
    with pytest.raises(errors.IncompleteCheckpointError, match=r"__0_0.distcp.*checksum"):
        stored[key].read()


@pytest.mark.parametrize("trusted", [False, True])
def test_damaged_part_falls_back(copied: Path, tmp_path: Path, trusted: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = Path(shutil.copytree(copied, tmp_path / "before"))
    part = copied / "shards" / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    reading = CheckpointReading(trusted, newest_first=[str(copied), str(before)])
    reader = TrialCheckpointIO(TorchCheckpointIO(), reading)
    loaded = reader.load_checkpoint(str(copied))[DETERMINED_KEY]
    # As with any other checkpoint, files that the user trusts may have been changed.
    assert loaded.directory == (copied if trusted else before)
    assert "__1_0.distcp has the checksum" in caplog.text


def test_error_of_a_rank_leaves_no_checkpoint(folder: Path) -> None:
    for rank in range(2):
        message = (folder / f"failure-{rank}.txt").read_text()
        assert message.endswith("cannot be written: rank 1: [Errno 27] File too large.")
    assert not list((folder / "failing-storage").glob("*/metadata.json"))
    assert not list((folder / "failing-storage").glob("*/shards"))


def test_saving_a_part_makes_no_second_copy(folder: Path) -> None:
    """Gathered on the chief, the whole state takes that much more; see tests/distributed/test_two_ranks.py."""
    for rank in range(2):
        found = torch.load(folder / f"memory-{rank}.pt")
        assert found["peak"] - found["before"] < 0.1 * LARGE_STATE_BYTES / 2
