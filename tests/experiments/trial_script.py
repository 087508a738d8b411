"""A trial without a model: reports a loss that falls with its steps, and goes on where it was when it is started again.

How it behaves is read from its hyperparameters: ``steps``, ``fails_at``, ``waits_at`` (steps at which it waits until it
is asked to stop), ``saves_for_s`` (how long it then takes to save), ``ignores_sigterm``, ``spawns``, ``invalid``
(gives up, then ``lives_on_for_s`` and ``ends_with`` a status), ``reports_progress``, ``validates`` (False: it only
reports training metrics), ``checkpoints`` (after each step).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TASK = json.loads(Path(os.environ["DET_LIGHTNING_TASK"]).read_text())
DIRECTORY = Path(TASK["directory"])
HPARAMS = TASK["hparams"]
stop_requested = False


def request_stop(*_: object) -> None:
    global stop_requested
    stop_requested = True


def report(group: str, steps: int | None, metrics: dict[str, object]) -> None:
    record = {"group": group, "run": TASK["run_id"], "steps_completed": steps, "metrics": metrics, "time": time.time()}
    with (DIRECTORY / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def main() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if HPARAMS.get("ignores_sigterm") else request_stop)
    alive = DIRECTORY / "alive"
    # Two runs of one trial at once would both find the file of the other.
    if alive.exists() and Path(f"/proc/{alive.read_text()}").exists():
        print("another run of this trial is alive", flush=True)
        return 9
    alive.write_text(str(os.getpid()))
    if HPARAMS.get("spawns"):
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    saved = DIRECTORY / "saved"
    first = int(saved.read_text()) if saved.exists() else 0
    if HPARAMS.get("invalid"):
        report("early_exit", None, {"reason": "INVALID_HP"})
        time.sleep(HPARAMS.get("lives_on_for_s", 0))
        return HPARAMS.get("ends_with", 0)
    for step in range(first + 1, HPARAMS.get("steps", 5) + 1):
        if step == HPARAMS.get("fails_at"):
            return 3
        group = "validation" if HPARAMS.get("validates", True) else "training"
        report(group, step, {"loss": HPARAMS.get("lr", 1.0) / step, "batches": step})
        if HPARAMS.get("checkpoints"):
            saved.write_text(str(step))
            report("checkpoint", step, {"checkpoint_id": f"after-{step}"})
        if HPARAMS.get("reports_progress"):
            report("progress", step, {"progress": step / HPARAMS["steps"]})
        while step in HPARAMS.get("waits_at", []) and not stop_requested:
            time.sleep(0.02)
        if stop_requested:
            time.sleep(HPARAMS.get("saves_for_s", 0))
            saved.write_text(str(step))
            return 75
    return 0


if __name__ == "__main__":
    sys.exit(main())
