"""Peak memory of two ranks that save a sharded model: gathered on the chief, and each rank its own part.

    python benchmarks/sharded_checkpoint.py [--mebibytes 512]

The state is that of a model in float32 with AdamW: a third each of weights and two moments. What a rank holds of it is
its shard. Peaks are those of the resident memory that Linux counts (``VmHWM``), from the save's begin on; freed memory
goes back to the system at once. ``torch.distributed.checkpoint`` is imported before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from det_lightning import core, pytorch
from det_lightning.adapters.strategies import PerModelFSDPStrategy
from det_lightning.units import Batch

WIDTH = 1024
MEBIBYTES = 512


class Large(pytorch.PyTorchTrial):
    """Layers of four MiB each, and one batch of noise."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        layers = context.get_hparam("layers")
        network = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
        self.context = context
        self.model = context.wrap_model(torch.nn.Sequential(*network))
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.watch = Watch(self)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, WIDTH)), batch_size=1)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": self.model(batch[0]).square().mean()}

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"watch": self.watch}

    def shard_bytes(self) -> int:
        """Return the size of what this rank holds of weights and optimizer."""
        states = [self.model.state_dict(), *self.optimizer.state_dict()["state"].values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, DTensor)]
        return sum(tensor.to_local().nbytes for tensor in tensors)


class Watch(pytorch.PyTorchCallback):
    """Notes how much memory is taken before the checkpoint, which follows the validation."""

    def __init__(self, trial: Large) -> None:
        self.trial = trial
        self.before = self.shard = 0
        self.started = 0.0

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Begin to watch."""
        import torch.distributed.checkpoint.state_dict_saver  # noqa: F401 (part of the program, not of the save)

        ctypes.CDLL(None).malloc_trim(0)
        self.shard = self.trial.shard_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is taken now
        self.before = status("VmRSS")
        self.started = time.perf_counter()


def status(name: str) -> int:
    """Return an entry of Linux's record of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(sharded: bool, layers: int, folder: str) -> None:
    """Train two batches, save, and write what was measured."""
    dist.init_process_group("gloo")
    with pytorch.init(
        hparams={"global_batch_size": 2, "layers": layers},
        exp_conf={"name": "large"},
        distributed=core.DistributedContext.from_torch_distributed(),
        enable_tensorboard_logging=False,
        strategy=PerModelFSDPStrategy(policy=[torch.nn.Linear], sharded_checkpoints=sharded),
    ) as context:
        trial = Large(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        trainer.fit(max_length=Batch(2), checkpoint_storage=f"{folder}/storage", checkpoint_policy="none")
    watch = trial.watch
    found = {
        "shard": watch.shard,
        "extra": status("VmHWM") - watch.before,
        "seconds": time.perf_counter() - watch.started,
    }
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(sharded: bool, layers: int) -> list[dict[str, Any]]:
    """Return what two ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(Path(__file__).resolve()),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
        arguments = ["--layers", str(layers), "--folder", folder, *(["--sharded"] if sharded else [])]
        code = Path(folder, "code")
        code.mkdir()
        subprocess.run([sys.executable, *command, *arguments], check=True, env=environment, cwd=code)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def ratio(found: dict[str, Any]) -> float:
    """Return the shard and what more is taken at the peak, relative to the shard."""
    return float((found["shard"] + found["extra"]) / found["shard"])


def figures(short: bool = False) -> dict[str, float]:
    """Return the peak memory of the chief relative to its shard, if it gathers and if the checkpoint is sharded."""
    layers = (192 if short else MEBIBYTES) // 12
    return {
        f"{name}/peak_ratio": round(ratio(run(name == "sharded", layers)[0]), 2) for name in ("gathered", "sharded")
    }


def main() -> None:
    """Measure both ways, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=MEBIBYTES, help="size of the whole state")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        measure(arguments.sharded, arguments.layers, arguments.folder)
        return
    layers = max(2, arguments.mebibytes // 12)
    print("| checkpoint | rank | shard, MiB | more at the peak, MiB | shard and peak, relative to the shard | s |")
    print("|---|---|---|---|---|---|")
    for name, sharded in (("gathered on the chief", False), ("sharded", True)):
        for rank, found in enumerate(run(sharded, layers)):
            shard, extra = found["shard"] / 2**20, found["extra"] / 2**20
            measured = f"{shard:.0f} | {extra:.1f} | {ratio(found):.2f} | {found['seconds']:.1f}"
            print(f"| {name} | {rank} | {measured} |", flush=True)


if __name__ == "__main__":
    main()
