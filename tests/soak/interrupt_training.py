"""Interrupts trainings with SIGINT and SIGTERM at random moments: each ends in time, and can be resumed bit-equal.

python tests/soak/interrupt_training.py --moments 500
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# What init() imports: before Python 3.12, Ctrl-C in the middle of an import may raise another error.
import det_lightning.config  # noqa: F401
from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.checkpoint.format.layout import BOOKKEEPING_DIR
from det_lightning.checkpoint.storage.staging import MARKS_DIR
from tests.soak import kill_training
from tests.soak.kill_training import Outcome, RecordedTrial, Variant, compare, holds_any, look_at, read_record, run_soak

LIMIT_S = 10.0  # for a training that was interrupted; what it writes here takes some milliseconds
WHOLE_LIMIT_S = 300.0  # for one that nobody interrupts, on a machine that has other things to do
PHASES = ("start-up", "first batches", "training", "checkpoint write", "validation", "shut-down")
VARIANTS = [
    (Variant(async_write=True), 0),
    (Variant(period=2), 0),
    (Variant(period=2, async_write=True, retention=True), 0),
    (Variant(period=3, async_write=True), 1),
]

fork = multiprocessing.get_context("fork")


class PhaseRecorder(pytorch.PyTorchCallback):
    """Keeps a file that names the phase of the training."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_training_start(self) -> None:
        self._file.write_text("first batches")

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self._file.write_text("training")

    def on_validation_start(self) -> None:
        self._file.write_text("validation")

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._file.write_text("training")

    def on_trial_shutdown(self) -> None:
        self._file.write_text("shut-down")


class PhasedTrial(RecordedTrial):
    """The trial, which tells its phase."""

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {**super().build_callbacks(), "phases": PhaseRecorder(self.record.with_name("phase"))}


def run(folder: Path, variant: Variant, workers: int, seed: int) -> None:
    """Train in this process, which ends as any interpreter does; write down an error that no signal explains."""
    os.setpgid(0, 0)
    kill_training.settle_in(folder)
    PhasedTrial.num_workers = workers
    try:
        kill_training.train(folder, variant, seed, PhasedTrial)
    except (KeyboardInterrupt, errors.Preempted):
        raise
    except BaseException:
        (folder / "failure").write_text(traceback.format_exc())
        raise


def start(folder: Path, variant: Variant, workers: int, seed: int) -> multiprocessing.process.BaseProcess:
    """Begin a training in a process that has imported all it needs."""
    (folder / "code").mkdir(parents=True, exist_ok=True)
    (folder / "phase").write_text("start-up")
    process = fork.Process(target=run, args=(folder, variant, workers, seed))
    process.start()
    assert process.pid is not None
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it may have done so itself
        os.setpgid(process.pid, process.pid)
    return process


def comes_to(phase: str, process: multiprocessing.process.BaseProcess, folder: Path) -> bool:
    """Wait until a training is in a phase; return False if it has ended before."""
    marks = folder / "storage" / BOOKKEEPING_DIR / MARKS_DIR
    while process.is_alive():
        if holds_any(marks) if phase == "checkpoint write" else (folder / "phase").read_text() == phase:
            return True
        time.sleep(0.0005)
    return False


def members(group: int) -> list[int]:
    """Return the processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


class Soak:
    """Interrupts trainings, at other moments for another seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.outcome = Outcome()
        self._folder = folder
        self._rng = random.Random(seed)
        self._turn = 0
        self._usual_s = 0.0
        self._records: dict[Path, dict[str, set[str]]] = {}

    def go_on(self, moments: int) -> Outcome:
        """Interrupt so many trainings; stop at the first finding."""
        while self.outcome.counts["moments"] < moments and not self.outcome.findings:
            variant, workers = VARIANTS[self._turn % len(VARIANTS)]
            if self._straight(workers) not in self._records:
                self._train_straight(workers)
            often = min(len(PHASES), moments - self.outcome.counts["moments"])
            self._interrupt_one(self._folder / f"run{self._turn}", variant, workers, often)
            self._turn += 1
        return self.outcome

    def _straight(self, workers: int) -> Path:
        """Return the folder of a training that nobody interrupts; one with workers draws other random numbers."""
        return self._folder / f"straight{workers}"

    def _train_straight(self, workers: int) -> None:
        since, folder = time.monotonic(), self._straight(workers)
        process = start(folder, Variant(), workers, seed=3)
        process.join(WHOLE_LIMIT_S)
        self._usual_s = time.monotonic() - since
        if process.exitcode != 0:
            self._found(folder, f"the straight training ended with {process.exitcode}")
            process.kill()
        else:
            self._records[folder] = read_record(folder)

    def _interrupt_one(self, folder: Path, variant: Variant, workers: int, often: int) -> None:
        """Interrupt a training again and again, then let it come to its end."""
        phases = [PHASES[(self._turn + index) % len(PHASES)] for index in range(often)]
        # The last one first would leave nothing to interrupt.
        for begun, phase in enumerate(sorted(phases, key=PHASES.index)):
            process = start(folder, variant, workers, seed=100 + begun)
            is_interrupted = self._is_interrupted(process, folder, phase)
            if is_interrupted and (folder / "failure").exists():
                self._found(folder, (folder / "failure").read_text())
            if is_interrupted and (folder / "storage").exists():
                for finding in look_at(CheckpointStorage(folder / "storage"))[0]:
                    self._found(folder, finding)
            if self.outcome.findings:
                return
        process = start(folder, variant, workers, seed=200)
        process.join(WHOLE_LIMIT_S)
        if process.exitcode != 0:
            process.kill()
            self._found(folder, f"a training that went on ended with {process.exitcode} ({variant})")
            return
        straight = self._straight(workers)
        for finding in compare(folder, straight, self._records[straight]):
            self._found(folder, f"{variant}, at the end: {finding}")
        self.outcome.counts["bit-equal ends"] += 1
        shutil.rmtree(folder)

    def _is_interrupted(self, process: multiprocessing.process.BaseProcess, folder: Path, phase: str) -> bool:
        """Send a signal in a phase; return False if the training has ended before."""
        rng, pid = self._rng, process.pid
        assert pid is not None
        if phase in ("training", "checkpoint write", "validation"):
            process.join(rng.uniform(0.0, 0.3 * self._usual_s))
        if not comes_to(phase, process, folder):
            return False
        time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.004), rng.uniform(0.0, 0.05)]))
        number = rng.choice([signal.SIGINT, signal.SIGTERM])
        # Ctrl-C reaches all processes of the group; and it is pressed more than once.
        send = os.killpg if number == signal.SIGINT and rng.random() < 0.5 else os.kill
        since = time.monotonic()
        for pause_s in [0.0] if rng.random() < 0.7 else [0.0, rng.uniform(0.0, 0.05)]:
            time.sleep(pause_s)
            with contextlib.suppress(ProcessLookupError):
                send(pid, number)
        process.join(LIMIT_S)
        what = f"{number.name} in {phase}"
        if process.is_alive():
            self._found(folder, f"{what}: process {pid} did not end within {LIMIT_S:.0f} s")
            os.killpg(pid, signal.SIGKILL)
            return True
        while members(pid) and time.monotonic() < since + LIMIT_S:
            time.sleep(0.05)
        if left := members(pid):
            self._found(folder, f"{what}: processes {left} are left")
            os.killpg(pid, signal.SIGKILL)
        self.outcome.counts.update(["moments", number.name, f"in {phase}", f"status {process.exitcode}"])
        return True

    def _found(self, folder: Path, finding: str) -> None:
        said = (folder / "errors").read_text()[-3000:] if (folder / "errors").exists() else ""
        self.outcome.findings.append(f"{folder.name}: {finding}\n{said}")


if __name__ == "__main__":
    # As in a shell's foreground, however the soak itself was started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_soak("moments", 500, lambda args, folder: Soak(folder, args.seed).go_on(args.moments))
