"""Turns the entrypoint of an experiment configuration into the command that starts a trial."""

from __future__ import annotations

import re
import sys

_CLASS = re.compile(r"[\w.]+:[\w.]+")


def is_class(entrypoint: str | list[str]) -> bool:
    """Return whether an entrypoint names a trial class, as ``module:Class``."""
    return isinstance(entrypoint, str) and _CLASS.fullmatch(entrypoint) is not None


def command_of(entrypoint: str | list[str], slots: int) -> list[str]:
    """Return the command that runs an entrypoint in ``slots`` processes.

    A class is trained by the harness, under torchrun if there are several processes; any other string is a shell
    command, and a list is run as it is.
    """
    if isinstance(entrypoint, list):
        return entrypoint
    if not is_class(entrypoint):
        return ["sh", "-c", entrypoint]
    harness = [sys.executable, "-m", "det_lightning.exec.harness", entrypoint]
    if slots <= 1:
        return harness
    launcher = [sys.executable, "-m", "det_lightning.launch.torch_distributed", "--nproc-per-node", str(slots), "--"]
    return [*launcher, *harness]
