"""How long checkpoints take that hold the code of a large project, relative to the real determined.

    python benchmarks/code_copy.py [--files 1000] [--checkpoints 4] [--rounds 3]

A trial of one weight saves a checkpoint after each batch, in a working directory with so many small files, in twenty
directories. Each side is a process of its own, in turn; the time is that of ``fit``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

SIDES = ("determined", "det_lightning")


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured: so many files and checkpoints, and so many runs of each side."""

    files: int = 1000
    checkpoints: int = 4
    rounds: int = 3


def measure(side: str, checkpoints: int, storage: str) -> float:
    """Return the seconds of a training in the working directory."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    if side == "determined":
        from determined import pytorch
    else:
        from det_lightning import pytorch  # type: ignore[no-redef]

    class Small(pytorch.PyTorchTrial):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.model = context.wrap_model(torch.nn.Linear(1, 1))
            self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=1)

        build_validation_data_loader = build_training_data_loader

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.model(batch[0]).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"loss": 0.0}

    where = {} if side == "determined" else {"checkpoint_storage": storage}
    with pytorch.init() as context:
        trainer = pytorch.Trainer(Small(context), context)
        begun = time.perf_counter()
        trainer.fit(
            max_length=pytorch.Batch(checkpoints),
            checkpoint_period=pytorch.Batch(1),
            checkpoint_policy="none",
            **where,
        )
        return time.perf_counter() - begun


def run(side: str, size: Size) -> float:
    with tempfile.TemporaryDirectory() as folder:
        code = pathlib.Path(folder, "code")
        for number in range(size.files):
            path = code / f"package{number % 20}" / f"module{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"NUMBER = {number}\n" * 20)
        environment = {**os.environ, "XDG_DATA_HOME": str(pathlib.Path(folder, "data"))}
        command = [
            sys.executable,
            str(pathlib.Path(__file__).resolve()),
            "--side",
            side,
            "--checkpoints",
            str(size.checkpoints),
        ]
        command += ["--storage", str(pathlib.Path(folder, "storage"))]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=code, env=environment)
        return float(json.loads(done.stdout.splitlines()[-1]))


def compare(size: Size) -> dict[str, float]:
    """Return the median seconds of each side."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(size.rounds):
        for side in SIDES:
            found[side].append(run(side, size))
    return {side: statistics.median(seconds) for side, seconds in found.items()}


def figures(short: bool = False) -> dict[str, float]:
    """Return the time relative to the real determined."""
    found = compare(Size(rounds=1) if short else Size())
    return {"time_ratio": round(found["det_lightning"] / found["determined"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--side", choices=SIDES, help="measure one side in this process, and print its seconds")
    parser.add_argument("--storage", default="checkpoints")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.checkpoints, options.storage)))
        return
    found = compare(Size(options.files, options.checkpoints, options.rounds))
    for side, seconds in found.items():
        print(f"{side}: {seconds:.2f} s, {seconds / found['determined']:.2f} of the real one")


if __name__ == "__main__":
    main()
