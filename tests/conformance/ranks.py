"""One rank of runs on one of the two sides; started by torchrun, writes what happened to files.

torchrun --nproc-per-node 2 -m tests.conformance.ranks SIDE CASES OUTPUT_DIR
"""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.conformance import trials
from tests.conformance.sides import Trace, as_unit, own_ports, run
from tests.launching import TORCHRUN, environment
from tests.warm_python import start_warm_python

#: Name of the trial, and the arguments of ``fit``: units as ``["Batch", 5]``, and those of ``init`` under that name.
Case = tuple[str, dict[str, Any]]


def launch(module: str, side: str, cases: dict[str, Any], output: Path, ranks: int = 2) -> None:
    """Run a module of these tests for a side on several ranks, which write to ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    launcher = [start_warm_python().executable, *TORCHRUN[:-1], str(ranks), "-m", f"tests.conformance.{module}"]
    command = [*launcher, side, json.dumps(cases), str(output)]
    variables = environment(USE_TORCH_DISTRIBUTED="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=variables, cwd=output)
    assert done.returncode == 0, done.stderr[-6000:]


def run_ranks(side: str, cases: dict[str, Case], output: Path) -> dict[str, list[Trace]]:
    """Train trials of ``tests.conformance.trials``, one after another; return what happened in each on each rank."""
    launch("ranks", side, cases, output)
    per_rank = [pickle.loads((output / f"{rank}.pkl").read_bytes()) for rank in range(2)]
    return {name: [traces[name] for traces in per_rank] for name in cases}


def connect(side: str) -> Any:
    """Return a side's context of the processes that are connected."""

    def as_chief(mine: Any) -> Any:
        shared = [mine]
        dist.broadcast_object_list(shared)
        return shared[0]

    context_class = importlib.import_module(f"{side}.core").DistributedContext
    with own_ports(context_class, as_chief):
        return context_class.from_torch_distributed()


def main(side: str, cases: dict[str, Case], output: Path) -> None:
    dist.init_process_group("gloo")
    traces = {}
    for name, (trial, options) in cases.items():
        init = {**options.pop("init", {}), "distributed": connect(side)}
        units = {argument: as_unit(value) for argument, value in options.items()}
        traces[name] = run(side, getattr(trials, trial), init=init, **units)
        dist.barrier()
    (output / f"{dist.get_rank()}.pkl").write_bytes(pickle.dumps(traces))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
