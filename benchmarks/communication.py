"""What ranks exchange for a report and on the way of a batch, and how fast two are beside plain DDP.

    python benchmarks/communication.py [--rounds 5] [--batches 200]

What a report costs is counted for 2, 4, 8 and 16 ranks; see ``report_traffic.py``.

Collectives are counted by torch's profiler, which sees every call into the process group, those from C++ too. A
batch's are those from its first line of trial code to that of the next batch. The model is an MLP with a batch norm
(whose buffers DistributedDataParallel broadcasts), gradients of 4 batches are aggregated.

Speed is that of the same model, loss and optimizer in a plain loop on DistributedDataParallel, updating at every
batch, in processes of the same launch that take turns; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import report_traffic
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from det_lightning import core, pytorch
from det_lightning.callbacks import DeterminedCheckpoint

AGGREGATION, COUNTED_BATCHES = 4, 12


def make_model(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(width, 10))


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(4096, 64, generator=generator), torch.randint(0, 10, (4096,), generator=generator)
    )


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(make_model(context.get_hparam("width")))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.begun: list[float] = []

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(make_data(), batch_size=32, shuffle=True)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.begun.append(time.perf_counter())
        with record_function(f"batch {batch_idx}"):
            loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

    def evaluate_full_dataset(self, data_loader: Any) -> Any:
        return {"loss": 0.0}


def train(batches: int, width: int, frequency: int = 1) -> Trial:
    with pytorch.init(
        hparams={"width": width},
        distributed=core.DistributedContext.from_torch_distributed(),
        enable_tensorboard_logging=False,
        aggregation_frequency=frequency,
    ) as context:
        trial = Trial(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False, limit_val_batches=0)
        trainer.fit(
            max_length=pytorch.Batch(batches),
            checkpoints=DeterminedCheckpoint(tempfile.mkdtemp(), policy="none", code_dir=tempfile.mkdtemp()),
        )
        return trial


def count_collectives() -> list[dict[str, int]]:
    """Return the collectives of each batch but the last, by name."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(COUNTED_BATCHES, width=128, frequency=AGGREGATION)
    events = profiler.events()
    marks = sorted((e.time_range.start, int(e.name.split()[1])) for e in events if e.name.startswith("batch "))
    counts = [Counter[str]() for _ in marks[:-1]]
    for event in events:
        if event.name.startswith("c10d::"):
            for (start, batch), (end, _) in itertools.pairwise(marks):
                if start <= event.time_range.start < end:
                    counts[batch][event.name.removeprefix("c10d::")] += 1
    return [dict(count) for count in counts]


def seconds_of_plain(batches: int, width: int) -> float:
    """Return the seconds of a batch, the median of a plain loop."""
    model = torch.nn.parallel.DistributedDataParallel(make_model(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = torch.utils.data.distributed.DistributedSampler(make_data(), shuffle=True)
    begun: list[float] = []
    while len(begun) < batches:
        for inputs, labels in torch.utils.data.DataLoader(make_data(), batch_size=32, sampler=sampler):
            begun.append(time.perf_counter())
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(begun) == batches:
                break
    return per_batch(begun)


def per_batch(begun: list[float]) -> float:
    rest = begun[len(begun) // 4 :]
    return (rest[-1] - rest[0]) / (len(rest) - 1)


def run_rank(rounds: int, batches: int, output: Path) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"collectives": count_collectives(), "speed": {}}
    for width in (128, 1024):
        plain, ours = [], []
        for _ in range(rounds):
            plain.append(seconds_of_plain(batches, width))
            ours.append(per_batch(train(batches, width).begun))
        found["speed"][width] = (statistics.median(plain), statistics.median(ours))
    if dist.get_rank() == 0:
        output.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        run_rank(options.rounds, options.batches, options.output)
        return
    print(report_traffic.table(list(report_traffic.SIZES)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        command = [*launcher, "--rounds", str(options.rounds), "--batches", str(options.batches)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--output", str(output)], check=True, env=environment)
        found = json.loads(output.read_text())
    print("\n| batch | collectives |\n|---|---|")
    for batch, counts in enumerate(found["collectives"]):
        print(f"| {batch} | {', '.join(f'{name} {count}' for name, count in counts.items()) or 'none'} |")
    print("\n| hidden units | plain DDP, ms a batch | det_lightning | speed, of plain |\n|---|---|---|---|")
    for width, (plain, ours) in found["speed"].items():
        print(f"| {width} | {plain * 1e3:.2f} | {ours * 1e3:.2f} | {plain / ours:.2f} |")


if __name__ == "__main__":
    main()
