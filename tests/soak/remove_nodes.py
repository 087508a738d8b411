"""Ends nodes of a Ray cluster at random moments of a trial that is larger than a node: each trial completes.

python tests/soak/remove_nodes.py --runs 10

The trial has four slots on two nodes of three. A node is ended like a machine that loses its power: Ray's processes and
the trial's get SIGKILL. No batch before the newest checkpoint of that moment may be trained again.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.experiments.ray.conftest import add_node, end_node
from tests.experiments.running import events_of, pids_of, start, wait_for, write_project
from tests.soak.kill_training import Outcome, run_soak

BATCHES = 40
LIMIT_S = 240.0
NAMES = ("first", "second", "third")
# Trains nothing, but waits for all ranks at each batch, and saves what has to be saved.
SCRIPT = f"""
import os, time
import torch.distributed as dist
import determined as det
dist.init_process_group("gloo")
distributed = det.core.DistributedContext.from_torch_distributed()
info = det.get_cluster_info()
with det.core.init(distributed=distributed) as core_context:
    first = 0
    if info.latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(info.latest_checkpoint) as path:
            first = int((path / "batch.txt").read_text())
    for batch in range(first + 1, {BATCHES} + 1):
        dist.barrier()
        time.sleep(0.2)
        if distributed.rank == 0:
            print("trained", batch, flush=True)
            if batch % 4 == 0:
                with core_context.checkpoint.store_path({{"steps_completed": batch}}) as (path, _):
                    (path / "batch.txt").write_text(str(batch))
            core_context.train.report_validation_metrics(batch, {{"loss": 1 / batch}})
"""


def run_once(cluster: Any, folder: Path, generator: random.Random) -> str:
    """Run the trial once and end one of its nodes; return what was found, empty if all is well."""
    entrypoint = "python3 -m determined.launch.torch_distributed batches.py"
    sections: dict[str, Any] = {"entrypoint": entrypoint, "resources": {"slots_per_trial": 4}, "max_restarts": 1}
    config = write_project(folder / "project", **sections)
    (folder / "project" / "batches.py").write_text(SCRIPT)
    experiment = folder / "small-1"
    options = ("--cpu", "--experiments", folder, "--ray", cluster.address)
    process = start("run", config, config.parent, *options)
    try:
        wait_for(lambda: bool(events_of(experiment, "run_placed")) or process.poll() is not None, timeout_s=LIMIT_S)
        assert events_of(experiment, "run_placed"), f"the runner ended with {process.returncode}"
    except AssertionError as error:
        process.kill()
        raise AssertionError(f"the trial was not placed, {error}: {process.communicate()[1]}") from None
    after = generator.randrange(BATCHES - 1)  # so many batches
    if generator.random() < 0.8:
        wait_for(lambda: len(events_of(experiment, "validation")) >= after, timeout_s=LIMIT_S)
    time.sleep(generator.uniform(0.0, 4.0))
    nodes = events_of(experiment, "run_placed")[0]["nodes"]
    lost = generator.choice(nodes)
    saved = [event["steps_completed"] for event in events_of(experiment, "checkpoint")]
    reported = len(events_of(experiment, "validation"))
    removed_at = time.time()
    end_node(cluster, lost, experiment / "trials" / "1" / "nodes" / str(nodes.index(lost)))
    output = process.communicate(timeout=LIMIT_S)[1]
    add_node(cluster, cpus=2, node_name=lost)
    log = (experiment / "trials" / "1" / "log.txt").read_text()
    trained = [int(line.rpartition(" ")[2]) for line in log.splitlines() if "[rank=0] trained " in line]
    ends = events_of(experiment, "run_ended")
    again = [batch for batch in trained if trained.count(batch) > 1 and batch <= max(saved, default=0)]
    ended_s = ends[0]["time"] - removed_at
    print(
        f"node {lost} was lost after {reported} batches, {max(saved, default=0)} of them saved; {ended_s:.1f} s",
        flush=True,
    )
    problems = {
        f"ended with {process.returncode}: {output}": process.returncode != 0,
        f"batches {again} were trained again": bool(again),
        f"batches are missing: {sorted(set(trained))}": sorted(set(trained)) != list(range(1, BATCHES + 1)),
        "the trial needed over a minute to end": ended_s > 60,
        f"processes are left: {pids_of(experiment)}": bool(pids_of(experiment)),
    }
    return "; ".join(problem for problem, found in problems.items() if found)


def soak(runs: int, seed: int, folder: Path) -> Outcome:
    """Run the trial so many times on a cluster of its own."""
    from ray.cluster_utils import Cluster

    outcome, generator, cluster = Outcome(), random.Random(seed), Cluster()
    try:
        add_node(cluster, cpus=0)
        for name in NAMES:
            add_node(cluster, cpus=2, node_name=name)
        for number in range(runs):
            outcome.findings += filter(None, [run_once(cluster, folder / str(number), generator)])
            outcome.counts["runs"] += 1
    finally:
        cluster.shutdown()
    return outcome


if __name__ == "__main__":
    run_soak("runs", 10, lambda args, folder: soak(args.runs, args.seed, folder))
