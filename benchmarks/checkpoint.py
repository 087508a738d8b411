"""How long a checkpoint of a large state keeps the training waiting, and how much memory it takes.

    python benchmarks/checkpoint.py [--megabytes 500] [--checkpoints 6] [--period 25] [--directory DIR]

The trial holds a state of the given size, half of it the momentum of its optimizer. Every ``--period`` batches are
followed by a checkpoint to the same disk: by a plain ``torch.save`` of the same state, by det_lightning while the
training waits, and by det_lightning in the background. Where the batches are so short that the checkpoint before is not
written yet, the trial waits for that beforehand. A pause is the time from the end of one batch to the begin of the
next. Each way of saving is a process of its own. Memory is the peak of the resident set over that of the process that
saves by ``torch.save``, which copies nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from typing import Any

WAYS = ["torch.save", "waiting", "background"]


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured: a state of so many megabytes, and so many checkpoints, so many batches apart."""

    megabytes: int = 500
    checkpoints: int = 6
    period: int = 25


def resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class MemoryWatch(threading.Thread):
    """Looks at the resident set a hundred times a second and remembers its peak."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, resident_bytes())
            time.sleep(0.01)


def measure(way: str, size: Size, directory: str) -> dict[str, float]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    from det_lightning import pytorch
    from det_lightning.callbacks import DeterminedCheckpoint

    period = size.period
    rows = size.megabytes * 1024 * 1024 // (2 * 4 * 1024)
    watch = MemoryWatch()

    def now() -> float:
        """Return the time when the device has done all that it was asked to."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    class Large(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            self.model = context.wrap_model(torch.nn.EmbeddingBag(rows, 1024, mode="sum"))
            sgd = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
            self.optimizer = context.wrap_optimizer(sgd)
            self.pauses: list[float] = []
            self.batches: list[float] = []
            self.ended = 0.0

        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.arange(4096) % rows), batch_size=4)

        build_validation_data_loader = build_training_data_loader

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if (batch_idx + 1) % period == 0:
                for thread in threading.enumerate():
                    if thread.name.startswith("checkpoint"):
                        thread.join()
            begun = now()
            if batch_idx and batch_idx % period == 0:
                self.pauses.append(begun - self.ended)
            loss = (self.model(batch[0].reshape(-1, 1)) ** 2).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            if way == "torch.save" and (batch_idx + 1) % period == 0:
                saving = now()
                torch.save(
                    {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()},
                    pathlib.Path(directory) / f"{batch_idx}.pth",
                )
                self.pauses.append(now() - saving)
            if batch_idx == 1:
                watch.start()
            self.ended = now()
            self.batches.append(self.ended - begun)
            return {"loss": loss}

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"loss": 0.0}

    with pytorch.init(enable_tensorboard_logging=False) as context:
        trial = Large(context)
        pytorch.Trainer(trial, context, enable_progress_bar=False, limit_val_batches=0).fit(
            max_length=pytorch.Batch(period * size.checkpoints + 1),
            checkpoints=DeterminedCheckpoint(
                directory,
                policy="none",
                period=pytorch.Batch(period if way != "torch.save" else 10**9),
                code_dir=tempfile.mkdtemp(dir=directory),
                async_write=way == "background",
            ),
        )
    pauses = [pause for pause in trial.pauses if way != "torch.save" or pause > 0.01]
    return {
        "first": pauses[0],
        "later": statistics.median(pauses[1:]),
        "batch": statistics.median(trial.batches),
        "peak": watch.peak,
    }


def compare(size: Size, parent: str | None = None) -> dict[str, dict[str, float]]:
    """Return for each way of saving its seconds, its pauses relative to ``torch.save``, and its memory in states."""
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory(dir=parent) as directory:
            command = [sys.executable, __file__, "--way", way, "--directory", directory]
            for name, value in dataclasses.asdict(size).items():
                command += [f"--{name}", str(value)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[way] = json.loads(done.stdout.splitlines()[-1])
    plain = found["torch.save"]
    for numbers in found.values():
        numbers["first_ratio"] = numbers["first"] / plain["later"]
        numbers["later_ratio"] = numbers["later"] / plain["later"]
        numbers["extra_states"] = (numbers["peak"] - plain["peak"]) / (size.megabytes * 1024 * 1024)
    return found


def figures(short: bool = False) -> dict[str, float]:
    """Return the pauses of later checkpoints relative to ``torch.save``, and the memory for the copy, in states."""
    found = compare(Size(megabytes=100, checkpoints=4, period=10) if short else Size())
    return {
        "waiting/pause_ratio": round(found["waiting"]["later_ratio"], 2),
        "background/pause_ratio": round(found["background"]["later_ratio"], 3),
        "background/extra_states": round(found["background"]["extra_states"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=Size.megabytes)
    parser.add_argument("--checkpoints", type=int, default=Size.checkpoints)
    parser.add_argument("--period", type=int, default=Size.period, help="batches between two checkpoints")
    parser.add_argument("--directory", default=None, help="where to write; by default the temporary directory")
    parser.add_argument("--way", choices=WAYS, help="measure one way in this process, and print it as JSON")
    options = parser.parse_args()
    size = Size(options.megabytes, options.checkpoints, options.period)
    if options.way:
        print(json.dumps(measure(options.way, size, options.directory)))
        return
    found = compare(size, options.directory)
    print(f"{size.megabytes} MB, {size.checkpoints} checkpoints, a batch takes {found['waiting']['batch']:.3f} s")
    print("| way | first pause s | later pauses s | first, of torch.save | later, of it | extra memory, in states |")
    print("|---|---|---|---|---|---|")
    for way, of in found.items():
        ratios = f"{of['first_ratio']:.0%} | {of['later_ratio']:.0%}"
        print(f"| {way} | {of['first']:.3f} | {of['later']:.3f} | {ratios} | {of['extra_states']:.2f} |")


if __name__ == "__main__":
    main()
