"""Trials that go on from one checkpoint at the same time, in one storage, some of them killed and started again.

None loses a checkpoint that it needs, all end with the weights of a training that had the storage for itself, and what
is left of each trial is what retention keeps.

python tests/soak/share_storage.py --rounds 50
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from det_lightning import pytorch
from det_lightning.checkpoint import CheckpointStorage, Retention
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
from tests.soak import kill_training
from tests.soak.kill_training import Outcome, find_unreadable, run_soak, wait
from tests.trials import SmallTrial, seed_everything, weights_of

FIRST_PART, LENGTH = 3, 14
KEEP_ONE = Retention(0, 0, 1)


def train(folder: Path, name: str, length: int, latest: str | None, async_write: bool) -> None:
    """Train, and write down the weights at the end."""
    seed_everything(3 if latest is None else 99)
    writing = {"period": pytorch.Batch(1), "async_write": async_write, "retention": KEEP_ONE, "trial": name}
    trial = kill_training.fit(SmallTrial, folder, length, latest, **writing)
    (folder / f"end-{name}").write_text(repr(weights_of(trial).tolist()))


def start(folder: Path, name: str, length: int, latest: str | None, async_write: bool = False) -> int:
    """Begin a run in a process that has imported all it needs; return its id."""
    work = functools.partial(train, folder, name, length, latest, async_write)
    return kill_training.start(folder, work, f"-{name}")


def share(folder: Path, runs: int, rng: random.Random, outcome: Outcome) -> None:
    """Let several runs go on from one checkpoint, kill one of them or none, and look at what is left."""
    wait(start(folder, "first", FIRST_PART, None))
    storage = CheckpointStorage(folder / "storage")
    common = storage.newest()
    if common is None:
        outcome.findings.append((folder / "failure-first").read_text())
        return
    started = [start(folder, str(number), LENGTH, common, rng.random() < 0.5) for number in range(runs)]
    if rng.random() < 0.7:
        time.sleep(rng.uniform(0.0, 0.5))
        os.kill(started[0], signal.SIGKILL)
        if os.waitpid(started[0], 0)[1] != 0:
            outcome.counts["kills"] += 1
            # A newer one of any of the trials does as well.
            started[0] = start(folder, "0", LENGTH, "last")
        else:
            del started[0]
    for pid in started:
        wait(pid)
    outcome.findings += look_at(folder, storage, [str(number) for number in range(runs)])
    outcome.counts["ends"] += len([*folder.glob("end-*")]) - 1
    outcome.counts["trials"] += len({info.metadata["trial"] for info in storage.list_checkpoints()})


def look_at(folder: Path, storage: CheckpointStorage, names: list[str]) -> list[str]:
    """Return what is wrong after all runs have ended."""
    findings = [*(path.read_text() for path in folder.glob("failure-*")), *find_unreadable(storage)]
    steps = {name: storage.info(name).metadata for name in storage.list_ids()}
    pruned = plan_pruning(storage, KEEP_ONE)
    if pruned.unknown:
        findings.append(f"no trial has {pruned.unknown}")
    deleted = carry_out(pruned, storage)
    trials_left = sorted(metadata["trial"] for name, metadata in steps.items() if name not in deleted)
    if trials_left != sorted({metadata["trial"] for metadata in steps.values()}):
        findings.append(f"after pruning there are checkpoints of {trials_left}")
    if LENGTH not in [metadata["steps_completed"] for metadata in steps.values()]:
        findings.append("none of the checkpoints is that of an end")
    if left := [*(storage.root.local_path / BOOKKEEPING_DIR).glob("*")]:
        findings.append(f"left behind: {left}")
    if missing := [name for name in names if not (folder / f"end-{name}").exists()]:
        findings.append(f"runs {missing} did not come to their end")
    return findings


def soak(rounds: int, seed: int, folder: Path, runs: int = 2) -> Outcome:
    """Let runs share storages; all must end with the weights of a run that was alone."""
    outcome, rng = Outcome(), random.Random(seed)
    wait(start(folder / "alone", "alone", LENGTH, None))
    expected = (folder / "alone" / "end-alone").read_text()
    for number in range(rounds):
        here = folder / f"round{number}"
        share(here, runs, rng, outcome)
        for path in here.glob("end-*"):
            if path.name != "end-first" and path.read_text() != expected:
                outcome.findings.append(f"round {number}: {path.name} has other weights")
        outcome.counts["rounds"] += 1
        if outcome.findings:
            break
        shutil.rmtree(here)
    return outcome


if __name__ == "__main__":
    runs = {"type": int, "default": 2, "help": "in each storage"}
    run_soak("rounds", 50, lambda args, folder: soak(args.rounds, args.seed, folder, args.runs), runs=runs)
