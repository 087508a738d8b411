"""CPU time and peak memory from the start of Python to the first batch, with Lightning alone and with det_lightning.

    python benchmarks/start.py [--rounds 5]

Each measurement is a process of its own, and the two take turns. Imports are compiled before the first of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from relay import Blocks, Stopwatch, peak_mib, run_blocks, run_in_turn

ROUNDS = 5
SHORT_ROUNDS = 2
SYSTEMS = ("lightning", "ours")


class FirstBatch(Stopwatch):
    """Reports, at the first batch, the CPU time of the process so far, in microseconds."""

    def __init__(self) -> None:
        super().__init__(warm_up=1, blocks=1, length=1)

    def tick(self) -> None:
        """Count one batch."""
        self.seen += 1
        figure = time.process_time() * 1e6 if self.seen == 1 else 0.0
        # The first block is taken for a warm-up, so the figure comes as the second.
        if self.seen == 1:
            print("BLOCK 0 0", flush=True)
            print(f"BLOCK {figure:.0f} {peak_mib():.1f}", flush=True)


def run(system: str, watch: Any) -> None:
    import overhead
    from variants import VARIANTS, Task

    runner = overhead.RUNNERS["lightning_manual" if system == "lightning" else "ours"]
    runner(Task(VARIANTS["base"]), watch)


def measure(rounds: int) -> dict[str, Blocks]:
    return run_in_turn(__file__, SYSTEMS, blocks=1, launches=rounds)


def figures(short: bool = False) -> dict[str, float]:
    """Return what det_lightning adds to Lightning's start: seconds of CPU and MiB."""
    measured = measure(SHORT_ROUNDS if short else ROUNDS)
    lightning, ours = (measured[system] for system in SYSTEMS)
    return {
        "added_cpu_s": round(ours.added_to(lightning) / 1e6, 3),
        "added_peak_mib": round(ours.peak_mib - lightning.peak_mib, 1),
    }


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
