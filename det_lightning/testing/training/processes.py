"""Training a trial in several processes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from det_lightning.core.ports import free_port
from det_lightning.testing.training.execution import RunPlan, TrialSetup
from det_lightning.testing.training.shares import RankResult
from det_lightning.testing.training.trial_source import ImportedTrial

__all__ = ["train_in_processes"]

_RANKS = "det_lightning.testing.training.ranks"
# What another rank may take to fail too, once one has.
_GRACE_S = 5.0


def train_in_processes(
    setup: TrialSetup, source: ImportedTrial, plan: RunPlan, folder: Path, size: int = 2, timeout_s: float = 300
) -> list[RankResult]:
    """Train in ``size`` processes that share out each batch; return what each saw, or the first that failed.

    Args:
        setup: the trial; hyperparameters and arguments have to be JSON.
        source: where its class comes from.
        plan: what happens when; without schedules.
        folder: an empty one, for what the processes write.
        size: how many.
        timeout_s: how long to wait for them.

    Raises:
        RuntimeError: a process ended without a result, or they took too long; says what it wrote last.
        TypeError: the hyperparameters are no JSON.
    """
    folder.mkdir(parents=True)
    of_setup = {name: getattr(setup, name) for name in ("hparams", "config", "arguments", "seed")}
    settings = {
        "size": size,
        "port": free_port("127.0.0.1"),
        "timeout_s": timeout_s,
        "spec": source.spec,
        "directory": str(source.directory),
        "setup": of_setup,
        "plan": {name: value for name, value in dataclasses.asdict(plan).items() if not isinstance(value, frozenset)},
    }
    file = folder / "settings.json"
    file.write_text(json.dumps(settings, default=str))
    outputs = [(folder / f"output-{rank}.txt").open("w") for rank in range(size)]
    commands = [[sys.executable, "-m", _RANKS, str(file), str(rank)] for rank in range(size)]
    processes = [
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment(size))
        for command, output in zip(commands, outputs, strict=True)
    ]
    try:
        _wait(processes, timeout_s)
    finally:
        for process, output in zip(processes, outputs, strict=True):
            process.kill()
            process.wait()
            output.close()
    return _results(folder, size, processes)


def _environment(size: int) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = max(1, (os.cpu_count() or 1) // size)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait until all have ended, or one has failed and the others had time to say so too."""
    end = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + _GRACE_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            next(process for process in processes if process.poll() is None).wait(0.1)


def _results(folder: Path, size: int, processes: Sequence[subprocess.Popen[bytes]]) -> list[RankResult]:
    files = [folder / f"rank-{rank}.pkl" for rank in range(size)]
    written = {file: pickle.loads(file.read_bytes()) for file in files if file.exists()}
    failed = [file for file, result in written.items() if result.failure is not None]
    if failed:
        # Of the others some fail only because one did.
        first = min(failed, key=lambda file: file.stat().st_mtime_ns)
        return [written[first]]
    if len(written) == size:
        return list(written.values())
    silent = next(rank for rank, file in enumerate(files) if not file.exists())
    output = (folder / f"output-{silent}.txt").read_text(errors="replace").strip()
    raise RuntimeError(f"Process {silent} ended with status {processes[silent].returncode} and said:\n{output[-3000:]}")
