"""What the ranks of tests/distributed/test_sharded_checkpoints.py run; each rank writes what it found to a file.

torchrun --nproc-per-node 2 -m tests.distributed.sharded_ranks two OUTPUT [S3_URL OPTIONS]
torchrun --nproc-per-node 3 -m tests.distributed.sharded_ranks three OUTPUT
torchrun --nproc-per-node 2 -m tests.distributed.sharded_ranks aggregated OUTPUT
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from det_lightning import errors, pytorch
from det_lightning.adapters.strategies import PerModelFSDPStrategy
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.pytorch._weights import collect_weights, load_state
from tests.distributed.fsdp_ranks import context_of, save, train
from tests.distributed.fsdp_trials import Gan, Large, Plain, Random

FIVE = {"batches": 5}


class Looking(Random):
    """Notes what a trial's callbacks see of a state that nobody holds as a whole."""

    seen: list[str]

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        self.seen = []
        return {"look": Look(self)}


class Look(pytorch.PyTorchCallback):
    def __init__(self, trial: Looking) -> None:
        self.trial = trial

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        weight = checkpoint["models_state_dict"][0]["0.weight"]
        self.trial.seen.append(f"{weight.device} {[*weight.shape]}")

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        names = sorted(path.name for path in Path(checkpoint_dir).glob("shards/*"))
        self.trial.seen.append(" ".join(names))


def in_shards(**options: Any) -> PerModelFSDPStrategy:
    return PerModelFSDPStrategy(sharded_checkpoints=True, **options)


def two(output: Path, url: str = "", options: str = "{}") -> None:
    scenarios: list[tuple[str, type[Plain], int, list[str]]] = [
        ("random", Looking, 1, ["trial_fsdp"]),
        ("aggregated", Plain, 3, ["trial_fsdp", "trial_ddp"]),
        ("gan", Gan, 1, []),
    ]
    for name, kind, frequency, resuming in scenarios:
        if resuming:
            save(train(kind, output / f"{name}-whole", "trial_fsdp", frequency=frequency), output, f"{name}-whole")
        train(kind, output / f"{name}-five-whole", "trial_fsdp", frequency=frequency, **FIVE)
        written = train(kind, output / f"{name}-sharded", in_shards(), frequency=frequency, **FIVE)
        checkpoint = note_checkpoint(output, name)
        if isinstance(written, Looking):
            torch.save(written.seen, output / f"seen-{dist.get_rank()}.pt")
        dist.barrier()
        for strategy in resuming:
            storage = checkpoint.parent
            resumed = train(kind, storage, strategy, frequency=frequency, latest_checkpoint=checkpoint)
            save(resumed, output, f"{name}-{strategy}")
    if url:
        remote: Any = CheckpointStorage(url, options=json.loads(options))
        train(Random, remote, in_shards(), **FIVE)
        save(train(Random, remote, in_shards(), latest_checkpoint="last"), output, "remote")
    large = train(Large, output / "large-storage", in_shards(), batches=2)
    torch.save({"before": large.before, "peak": large.peak}, output / f"memory-{dist.get_rank()}.pt")
    (output / f"failure-{dist.get_rank()}.txt").write_text(failure(output / "failing-storage"))


def aggregated(output: Path) -> None:
    """Write one checkpoint, between two updates."""
    train(Plain, output / "aggregated-sharded", in_shards(), frequency=3, **FIVE)
    note_checkpoint(output, "aggregated")


def note_checkpoint(output: Path, name: str) -> Path:
    """Return the only sharded checkpoint of a scenario; the chief writes its path where the tests look for it."""
    (metadata,) = (output / f"{name}-sharded").glob("*/metadata.json")
    if dist.get_rank() == 0:
        (output / f"{name}-checkpoint.txt").write_text(str(metadata.parent))
    return metadata.parent


def failure(storage: Path) -> str:
    """Return the error of a run whose second rank cannot write more than 15 kB into a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, resource.RLIM_INFINITY))
    try:
        train(Plain, storage, in_shards(), **FIVE)
    except errors.CheckpointError as e:
        return str(e)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "nothing was raised"


def three(output: Path) -> None:
    """Load into three shards what two ranks have written; keep what is gathered from there."""
    path = (output / "gan-checkpoint.txt").read_text()
    content = load_checkpoint(path, in_parts=True)
    with context_of("trial_fsdp") as context:
        Gan(context)
        load_state(context, {}, {**content.state, "lr_schedulers_state_dict": []}, path)
        gathered = collect_weights(context)
        if dist.get_rank() == 0:
            torch.save(gathered, output / "three.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"two": two, "three": three, "aggregated": aggregated}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    dist.barrier()
    dist.destroy_process_group()
