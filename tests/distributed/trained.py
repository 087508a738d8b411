"""Starting tests/distributed/ranks.py, and reading what its ranks leave behind."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch

from det_lightning.checkpoint import load_checkpoint
from tests.launching import TORCHRUN, environment
from tests.warm_python import start_warm_python

#: How far sums of floats may be apart that were added in another order.
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def launch(command: str, folder: Path, *more: str, ranks: int = 2) -> None:
    """Run a command of ``tests.distributed.ranks`` on several ranks of torchrun, or by Lightning's own launcher."""
    launcher = [] if command == "lightning" else [*TORCHRUN[:-1], str(ranks)]
    arguments = [start_warm_python().executable, *launcher, "-m", "tests.distributed.ranks", command, str(folder)]
    done = subprocess.run([*arguments, *more], capture_output=True, text=True, timeout=400, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]


def results(folder: Path, name: str, ranks: int = 2) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(ranks)]


def last_weights(folder: Path, name: str) -> torch.Tensor:
    weights: torch.Tensor = results(folder, name, ranks=1)[0]["updates"][-1]
    return weights


def checkpoint_in(folder: Path, name: str) -> Path:
    (metadata,) = (folder / name).glob("*/metadata.json")
    return metadata.parent


def state_in(folder: Path, name: str) -> dict[str, Any]:
    return load_checkpoint(checkpoint_in(folder, name)).state


def reader(api: Any) -> type:
    """Return a trial of either side with the model of ``Plain``."""

    class Reader(api.PyTorchTrial):
        def __init__(self, context: Any) -> None:
            self.model = context.wrap_model(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)))
            context.wrap_optimizer(torch.optim.AdamW(self.model.parameters()))

        build_training_data_loader = build_validation_data_loader = train_batch = evaluate_batch = None

    return Reader


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
