"""Kills a training again and again, at any moment; what ends at last is bit-equal to a training that nobody killed.

python tests/soak/kill_training.py --kills 200
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from det_lightning import pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointStorage, Retention, read_checkpoint
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.staging import MARKS_DIR

# Imported here, and not by each of the processes that begin.
from det_lightning.pytorch._trainer import Trainer, init
from tests.trials import SmallTrial, seed_everything

LENGTH = 30
LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the training writes its checkpoints."""

    period: int = 1
    async_write: bool = False
    retention: bool = False  # of the best and the latest one


VARIANTS = [
    Variant(),
    Variant(async_write=True),
    Variant(period=2, async_write=True, retention=True),
    Variant(period=2, retention=True),
]


@dataclasses.dataclass
class Outcome:
    """What a soak did, how often, and what it found."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: list[str] = dataclasses.field(default_factory=list)


class Recorder(pytorch.PyTorchCallback):
    """Writes metrics and learning rates of every batch into a file, one line at a time."""

    def __init__(self, trial: RecordedTrial, file: Path) -> None:
        self._trial = trial
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _write(self, what: str, values: Any) -> None:
        rates = [group["lr"] for optimizer in self._trial.context.optimizers for group in optimizer.param_groups]
        line = json.dumps([what, values, rates], default=float)
        os.write(self._descriptor, f"\n{line}\n".encode())

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self._write(f"training {avg_metrics['batches']}", batch_metrics)

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._write(f"validation {self._trial.batches}", metrics)


class RecordedTrial(SmallTrial):
    """The trial, which tells what it does."""

    record: Path
    batches = 0

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {**super().build_callbacks(), "recorder": Recorder(self, self.record)}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.batches = batch_idx + 1
        return super().train_batch(batch, epoch_idx, batch_idx)


def train(folder: Path, variant: Variant, seed: int, trial_class: type[RecordedTrial] = RecordedTrial) -> None:
    """Train to the end, from the newest checkpoint on, and write down how it ended."""
    (folder / "storage").mkdir(parents=True, exist_ok=True)
    # A checkpoint brings its random state with it; only the beginning needs the seed.
    seed_everything(3 if CheckpointStorage(folder / "storage").newest() is None else seed)
    trial_class.record = folder / "record"
    retention = Retention(0, 1, 1) if variant.retention else None
    writing = {"period": pytorch.Batch(variant.period), "async_write": variant.async_write, "retention": retention}
    context = fit(trial_class, folder, LENGTH, "last", metric="validation_loss", **writing).context
    parts: list[Any] = [*context.models, *context.optimizers]
    (folder / "end.new").write_bytes(repr(_exact([part.state_dict() for part in parts])).encode())
    (folder / "end.new").rename(folder / "end")


def fit(trial_class: type[SmallTrial], folder: Path, length: int, latest: str | None, **writing: Any) -> SmallTrial:
    checkpoints = DeterminedCheckpoint(folder / "storage", policy="none", code_dir=folder / "code", **writing)
    with init(enable_tensorboard_logging=False) as context:
        trial = trial_class(context)
        Trainer(trial, context, enable_progress_bar=False).fit(
            max_length=pytorch.Batch(length),
            validation_period=pytorch.Batch(5),
            reporting_period=pytorch.Batch(1),
            latest_checkpoint=latest,
            checkpoints=checkpoints,
        )
    return trial


def _exact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return [(name, _exact(item)) for name, item in value.items()]
    return [_exact(item) for item in value] if isinstance(value, list | tuple) else value


def start(folder: Path, work: Callable[[], None], name: str = "") -> int:
    """Begin a training in a process that has imported all it needs; return its id."""
    (folder / "code").mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        settle_in(folder)
        work()
        code = 0
    except BaseException:
        (folder / f"failure{name}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def settle_in(folder: Path) -> None:
    """Make this process one that trains in a folder and says all it says in a file."""
    with (folder / "errors").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder / "code")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def has_ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


def wait(pid: int) -> None:
    """Wait for a training's end, for some time."""
    until = time.monotonic() + LIMIT_S
    while not has_ended(pid):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"a training did not end within {LIMIT_S:.0f} s")
        time.sleep(0.01)


def kill_at_random(pid: int, folder: Path, rng: random.Random, usual_s: float) -> bool:
    """Kill a training at some moment, half of the time while it writes; return False if it has ended before."""
    until = time.monotonic() + rng.uniform(0.0, 0.7 * usual_s)
    while time.monotonic() < until:
        if has_ended(pid):
            return False
        time.sleep(0.002)
    # A mark comes before a checkpoint's first file, and goes after its last.
    for is_there in rng.choice([(), (True,), (True,), (True, False)]):
        before, marks = time.monotonic(), folder / "storage" / BOOKKEEPING_DIR / MARKS_DIR
        while time.monotonic() - before < 2.0 and holds_any(marks) != is_there:
            if has_ended(pid):
                return False
    time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.004), rng.uniform(0.0, 0.02)]))
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1] != 0


def holds_any(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except FileNotFoundError:
        return False


def read_record(folder: Path) -> dict[str, set[str]]:
    """Return what was recorded of each batch and validation, as often as it was different."""
    found: dict[str, set[str]] = {}
    for line in (folder / "record").read_text().splitlines():
        try:
            what, values, rates = json.loads(line)
        except ValueError:  # cut off by a kill
            continue
        found.setdefault(what, set()).add(json.dumps([values, rates]))
    return found


def find_unreadable(storage: CheckpointStorage) -> list[str]:
    findings = []
    for name in storage.list_ids():
        try:
            read_checkpoint(storage.root.local_path / name)
        except Exception as e:  # any is wrong here
            findings.append(f"{name} is complete and cannot be read: {e!r}")
    return findings


def look_at(storage: CheckpointStorage) -> tuple[list[str], bool]:
    """Return what is wrong with a storage after a kill, and whether the kill tore a checkpoint."""
    root, complete, findings = storage.root.local_path, storage.list_ids(), find_unreadable(storage)
    newest = storage.newest()
    if (newest is None) != (not complete):
        findings.append(f"the newest of {len(complete)} checkpoints is {newest}")
    incomplete = [path for path in root.iterdir() if path.name not in (*complete, BOOKKEEPING_DIR)]
    if len(incomplete) > 1:
        findings.append(f"{len(incomplete)} incomplete checkpoints are there; the next run removes those of the last")
    marks = [path.name for path in (root / BOOKKEEPING_DIR / MARKS_DIR).glob("*")]
    if len(marks) > 1:
        findings.append(f"{len(marks)} marks are there: {marks}")
    return findings, bool(incomplete or marks)


def look_at_the_end(storage: CheckpointStorage, variant: Variant) -> list[str]:
    """Return what is wrong with a storage after a training came to its end."""
    complete, findings = storage.list_ids(), look_at(storage)[0]
    if variant.retention and len(complete) > 3:
        findings.append(f"{len(complete)} checkpoints were kept in place of two")
    rubbish = [str(path) for path in storage.root.local_path.iterdir() if path.name not in complete]
    return findings + ([f"left behind: {rubbish}"] if rubbish else [])


def soak(kills: int, seed: int, folder: Path, variants: list[Variant] = VARIANTS) -> Outcome:
    """Kill trainings of the variants in turn, until so many were killed and the last one came to its end.

    A kill is torn that left an incomplete checkpoint, or the mark of one; an end is that of a training.
    """
    outcome, rng = Outcome(), random.Random(seed)
    straight = folder / "straight"
    usual_s = 0.0
    for _ in range(2):  # the first one is slower
        shutil.rmtree(straight, ignore_errors=True)
        since = time.monotonic()
        wait(start(straight, lambda: train(straight, Variant(), 3)))
        usual_s = time.monotonic() - since
    if not (straight / "end").exists():
        outcome.findings.append(f"the straight training failed: {(straight / 'failure').read_text()}")
        return outcome
    expected = read_record(straight)
    often = max(1, min(25, kills // len(variants)))  # each variant has its turn
    for turn, variant in enumerate(itertools.cycle(variants)):
        run = folder / f"run{turn}"
        left = min(often, kills - outcome.counts["kills"])
        outcome.findings += _run_and_kill(run, variant, rng, usual_s, left, outcome)
        if not outcome.findings:
            outcome.findings += [f"run {turn} ({variant}): {found}" for found in compare(run, straight, expected)]
            shutil.rmtree(run)
        if outcome.counts["kills"] >= kills or outcome.findings:
            break
    return outcome


def _run_and_kill(
    folder: Path, variant: Variant, rng: random.Random, usual_s: float, kills: int, outcome: Outcome
) -> list[str]:
    """Kill one training up to ``kills`` times, then let it come to its end."""
    storage = CheckpointStorage(folder / "storage")
    for begun in range(kills):
        pid = start(folder, functools.partial(train, folder, variant, 100 + begun))
        if not kill_at_random(pid, folder, rng, usual_s):
            break
        outcome.counts["kills"] += 1
        findings, torn = look_at(storage) if storage.root.exists() else ([], False)
        outcome.counts["torn"] += torn
        if findings:
            return [f"{variant}, after kill {outcome.counts['kills']}: {finding}" for finding in findings]
    else:
        wait(start(folder, functools.partial(train, folder, variant, 100 + kills)))
    if (folder / "failure").exists():
        return [f"{variant}: {(folder / 'failure').read_text()}"]
    outcome.counts["ends"] += 1
    return [f"{variant}, at the end: {finding}" for finding in look_at_the_end(storage, variant)]


def compare(folder: Path, straight: Path, expected: dict[str, set[str]]) -> list[str]:
    if not (folder / "end").exists():
        return ["it did not come to its end"]
    findings = []
    if (folder / "end").read_bytes() != (straight / "end").read_bytes():
        findings.append("weights or optimizers are others")
    record = read_record(folder)
    different = [what for what in expected.keys() | record.keys() if expected.get(what) != record.get(what)]
    if different:
        what = min(different)
        findings.append(f"metrics or rates of {len(different)} differ, such as {what}: {record.get(what)}")
    return findings


def run_soak(
    count: str, default: int, soak: Callable[[argparse.Namespace, Path], Outcome], **more: dict[str, Any]
) -> None:
    """Run a soak with the arguments of the command line; print what it found, and exit with 1 if that is anything.

    The option ``count`` says how much to do; the soak is called with all arguments and an empty folder.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{count}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the outcome")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome = soak(args, Path(folder).resolve())
    if args.json:
        args.json.write_text(json.dumps({**outcome.counts, "findings": outcome.findings}))
    for finding in outcome.findings:
        print(f"--- {finding}")
    print(*(f"{count:8,} {name}" for name, count in sorted(outcome.counts.items())), sep="\n")
    print(f"{len(outcome.findings)} findings in {time.monotonic() - began:.0f} s")
    sys.exit(bool(outcome.findings))


if __name__ == "__main__":
    run_soak("kills", 200, lambda args, folder: soak(args.kills, args.seed, folder))
