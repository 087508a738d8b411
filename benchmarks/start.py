"""CPU time and peak memory from the start of Python to the first batch, with Lightning alone and with det_lightning.

    python benchmarks/start.py [--rounds 5]

Each measurement is a process of its own, and they take turns. A first one of each, which compiles what it imports into
a cache of the benchmark's own, does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

from relay import Blocks, Stopwatch, peak_mib, run_blocks, run_in_turn

ROUNDS = 5
SHORT_ROUNDS = 2
SYSTEMS = {"lightning": "lightning_manual", "ours": "ours", "ours_lightning_api": "ours_lightning_api"}


class FirstBatch(Stopwatch):
    """Reports, at the first batch, the CPU time of the process so far, in microseconds."""

    def __init__(self) -> None:
        super().__init__(warm_up=1, blocks=1, length=1)

    def tick(self) -> None:
        """Count one batch."""
        self.seen += 1
        if self.seen == 1:
            cpu_us = time.process_time() * 1e6
            print("BLOCK 0 0", flush=True)  # taken for a warm-up
            print(f"BLOCK {cpu_us:.0f} {peak_mib():.1f}", flush=True)


def run(system: str, watch: Any) -> None:
    import overhead
    from variants import VARIANTS, Task

    overhead.RUNNERS[SYSTEMS[system]](Task(VARIANTS["base"]), watch)


def measure(rounds: int) -> dict[str, Blocks]:
    """Return what ``rounds`` processes of each system took, which run one at a time."""
    with tempfile.TemporaryDirectory() as compiled:
        # Where Python writes no bytecode, the time of a start is mostly that of compiling.
        os.environ["PYTHONPYCACHEPREFIX"] = compiled
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        return measure_compiled(rounds)


def measure_compiled(rounds: int) -> dict[str, Blocks]:
    """Return what :func:`measure` does; the first process of each system writes the bytecode for the others."""
    measured = {system: Blocks() for system in SYSTEMS}
    for number in range(rounds + 1):
        for system in SYSTEMS:
            (found,) = run_in_turn(__file__, [system], blocks=1).values()
            if number:  # the first one compiles what it imports
                measured[system].per_batch += found.per_batch
                measured[system].peak_mib = max(measured[system].peak_mib, found.peak_mib)
    return measured


def figures(short: bool = False) -> dict[str, float]:
    """Return what det_lightning adds to Lightning's start: seconds of CPU and MiB."""
    measured = measure(SHORT_ROUNDS if short else ROUNDS)
    lightning = measured.pop("lightning")
    found: dict[str, float] = {}
    for system, blocks in measured.items():
        found[f"{system}/added_cpu_s"] = round(blocks.added_to(lightning) / 1e6, 3)
        found[f"{system}/added_peak_mib"] = round(blocks.peak_mib - lightning.peak_mib, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--blocks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run_blocks(lambda watch: run(arguments.one, watch), FirstBatch())
        return
    for system, blocks in measure(arguments.rounds).items():
        seconds = statistics.median(blocks.per_batch) / 1e6
        print(f"{system:12} {seconds:6.2f} s of CPU to the first batch, {blocks.peak_mib:5.0f} MiB at most")


if __name__ == "__main__":
    main()
