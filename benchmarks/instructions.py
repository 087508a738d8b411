"""Instructions of the processor that each system adds to a plain PyTorch loop, per batch, on a machine however busy.

    python benchmarks/instructions.py [--variants base,tensorboard] [--systems plain,determined,ours]

Each system of a variant trains twice under valgrind, which counts the instructions of all threads outside of the
kernel; the difference belongs to the batches that the longer training has more, reports included. The instructions of a
validation batch are found with longer validations, those of a validation without its batches with more of them. What
the numbers leave out is how often the processor waits for memory, which ``overhead.py`` measures on a quiet machine.
Needs ``valgrind``, and ``determined==0.38.1`` beside det_lightning for the system of that name.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys

import overhead
from relay import run_blocks
from variants import VARIANTS, Task

SHORTER = 300
MORE = 1000
#: A training is run for so many validations of so many batches.
VALIDATIONS = 4
SHORT_VALIDATION = 100


class Batches:
    """A watch that only counts the batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.seen = 0

    def tick(self) -> None:
        """Count one batch."""
        self.seen += 1


def instructions(variant: str, system: str, batches: int, validation_batches: int = SHORT_VALIDATION) -> int:
    """Return how many instructions a process executes that trains, or validates, this many batches.

    Raises:
        RuntimeError: the process failed; what it wrote is in the message.
    """
    counting = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    lengths = ["--one", str(batches), "--validation-batches", str(validation_batches)]
    one = [sys.executable, __file__, "--variants", variant, "--systems", system, *lengths]
    # One order of names in all dicts, and one thread: the rest of a run is the same each time.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.run([*counting, *one], env=environment, capture_output=True, text=True, check=False)
    counted = [int(number.replace(",", "")) for number in re.findall(r"I +refs: +([\d,]+)", process.stderr)]
    if process.returncode != 0 or not counted:
        raise RuntimeError(f"{' '.join(one)} failed:\n{process.stdout}{process.stderr}")
    return max(counted)  # Determined starts processes of its own, which execute far fewer


def measure(variant: str, system: str) -> dict[str, float]:
    """Return the instructions of a batch; for validations, also those of a validation without its batches.

    The latter are those of its start and end, and of the training batch before it.
    """
    if not VARIANTS[variant].validates:
        longer = instructions(variant, system, SHORTER + MORE)
        return {variant: (longer - instructions(variant, system, SHORTER)) / MORE}
    batches = VALIDATIONS * SHORT_VALIDATION
    base = instructions(variant, system, batches)
    longer = instructions(variant, system, batches + MORE, SHORT_VALIDATION + MORE // VALIDATIONS)
    batch = (longer - base) / MORE
    twice_as_many = instructions(variant, system, 2 * batches)
    return {
        variant: batch,
        "validation without its batches": (twice_as_many - base) / VALIDATIONS - SHORT_VALIDATION * batch,
    }


def added(variant: str, systems: list[str]) -> dict[str, dict[str, float]]:
    """Return what each system adds to the instructions of the plain loop: by measure and by system."""
    names = list(dict.fromkeys(["plain", *systems]))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(names, pool.map(lambda system: measure(variant, system), names), strict=True))
    plain = found.pop("plain")
    return {name: {system: counts[name] - plain[name] for system, counts in found.items()} for name in plain}


def figures(short: bool = False) -> dict[str, float]:
    """Return the ratios to what Determined adds; a ``short`` run takes the most important variants."""
    found: dict[str, float] = {}
    if shutil.which("valgrind") is None:
        print("valgrind is not installed, so no instructions are counted.")
        return found
    for variant in ("base", "tensorboard", "validation") if short else VARIANTS:
        systems = [system for system in overhead.systems_of(variant) if system in overhead.COMPARED]
        for name, counts in added(variant, systems).items():
            for system in sorted(counts.keys() - {"determined"}):
                found[f"{name}/{system}"] = round(counts[system] / counts["determined"], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--systems", default=",".join(overhead.COMPARED))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--validation-batches", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        task = Task(VARIANTS[arguments.variants], arguments.validation_batches)
        run_blocks(lambda watch: overhead.RUNNERS[arguments.systems](task, watch), Batches(arguments.one))
        return
    for variant in arguments.variants.split(","):
        known = overhead.systems_of(variant)
        found = added(variant, [system for system in arguments.systems.split(",") if system in known])
        for name, counts in found.items():
            report(name, VARIANTS[variant].title, counts)


def report(name: str, title: str, counts: dict[str, float]) -> None:
    print(f"\n{name}: {title}\n{'instructions':28} {'added':>12} {'ratio':>8}")
    for system, count in counts.items():
        ratio = count / counts["determined"] if "determined" in counts else float("nan")
        print(f"{system:28} {count:12,.0f} {ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
