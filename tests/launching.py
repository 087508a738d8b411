"""Starting trainings of tests/ending.py in processes of their own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.warm_python import VARIABLES, start_warm_python

ROOT = Path(__file__).resolve().parents[1]

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHER = ["-m", "det_lightning.launch.torch_distributed", "--nproc-per-node", "2"]


@dataclasses.dataclass
class Ended:
    """How a training ended.

    Attributes:
        status: of the process; minus the number of the signal that ended it.
        output: what it wrote to stdout and stderr.
    """

    status: int
    output: str


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **VARIABLES, **more}


def start(
    folder: Path, *arguments: str, launcher: list[str] | None = None, is_warm: bool = True, **variables: str
) -> subprocess.Popen[str]:
    """Start a training in ``folder``, in a process group of its own; not warm where the group or the end matters."""
    folder.mkdir(parents=True, exist_ok=True)
    python = start_warm_python().executable if is_warm else sys.executable
    command = [python, *(launcher or []), "-m", "tests.ending", str(folder), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**variables),
        cwd=folder,
        start_new_session=True,
    )
    (folder / "launcher").write_text(str(process.pid))
    return process


def wait(process: subprocess.Popen[str], timeout_s: float = 300) -> Ended:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ended(process.returncode, output)


def end_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    """Return what a rank ended with: its weights, and the first batch that it trained on."""
    content: dict[str, Any] = torch.load(folder / f"end-{rank}.pt", weights_only=True)
    return content
