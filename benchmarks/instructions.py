"""Instructions of the processor that each system adds to a plain PyTorch loop, per batch, on a machine however busy.

    python benchmarks/instructions.py [--variants base,tensorboard] [--systems plain,determined,ours]

Each system of a variant trains twice under valgrind, which counts the instructions of all threads outside of the
kernel; the difference belongs to the batches that the longer training has more, reports or validations included. What
the numbers leave out is how often the processor waits for memory, which ``overhead.py`` measures on a quiet machine.
Needs ``valgrind``, and ``determined==0.38.1`` beside det_lightning for the system of that name.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import os
import re
import shutil
import subprocess
import sys

import overhead
from relay import run_blocks
from variants import VALIDATION_BATCHES, VARIANTS, Task

SHORTER = 300
MORE = 1000


class Batches:
    """A watch that only counts the batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.seen = 0

    def tick(self) -> None:
        """Count one batch."""
        self.seen += 1


def instructions(variant: str, system: str, batches: int) -> int:
    """Return how many instructions a process executes that trains, or validates, this many batches.

    Raises:
        RuntimeError: the process failed; what it wrote is in the message.
    """
    counting = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    one = [sys.executable, __file__, "--variants", variant, "--systems", system, "--one", str(batches)]
    # One order of names in all dicts, and one thread: the rest of a run is the same each time.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.run([*counting, *one], env=environment, capture_output=True, text=True, check=False)
    counted = [int(number.replace(",", "")) for number in re.findall(r"I +refs: +([\d,]+)", process.stderr)]
    if process.returncode != 0 or not counted:
        raise RuntimeError(f"{' '.join(one)} failed:\n{process.stdout}{process.stderr}")
    return max(counted)  # Determined starts processes of its own, which execute far fewer


def per_batch(variant: str, system: str) -> float:
    """Return the instructions of a batch."""
    unit = VALIDATION_BATCHES if VARIANTS[variant].validates else 1
    shorter, longer = (math.ceil(batches / unit) * unit for batches in (SHORTER, SHORTER + MORE))
    difference = instructions(variant, system, longer) - instructions(variant, system, shorter)
    return difference / (longer - shorter)


def added(variant: str, systems: list[str]) -> dict[str, float]:
    """Return the instructions of a batch beyond those of the plain loop, by system."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        names = list(dict.fromkeys(["plain", *systems]))
        counts = dict(zip(names, pool.map(lambda system: per_batch(variant, system), names), strict=True))
    return {system: count - counts["plain"] for system, count in counts.items()}


def figures(short: bool = False) -> dict[str, float]:
    """Return the ratios to what Determined adds; a ``short`` run takes the most important variants."""
    found: dict[str, float] = {}
    if shutil.which("valgrind") is None:
        print("valgrind is not installed, so no instructions are counted.")
        return found
    for variant in ("base", "tensorboard", "validation") if short else VARIANTS:
        more = added(variant, [system for system in overhead.systems_of(variant) if system in overhead.COMPARED])
        for system in sorted(more.keys() - {"plain", "determined"}):
            found[f"{variant}/{system}"] = round(more[system] / more["determined"], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--systems", default=",".join(overhead.COMPARED))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run, task = overhead.RUNNERS[arguments.systems], Task(VARIANTS[arguments.variants])
        run_blocks(lambda watch: run(task, watch), Batches(arguments.one))
        return
    for variant in arguments.variants.split(","):
        print(f"\n{variant}: {VARIANTS[variant].title}\n{'instructions a batch':28} {'added':>10} {'ratio':>8}")
        known = overhead.systems_of(variant)
        more = added(variant, [system for system in arguments.systems.split(",") if system in known])
        for system, count in more.items():
            ratio = count / more["determined"] if "determined" in more else float("nan")
            print(f"{system:28} {count:10,.0f} {ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
