"""Measures systems in turn, each in a process of its own, so that a machine whose speed drifts slows down all alike."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

__all__ = ["Measured", "Stopwatch", "measure_in_turn", "processor_time"]

#: Of each system, for every round: microseconds per batch, and the peak memory of the process in MiB.
Measured = dict[str, list[tuple[float, float]]]


def processor_time() -> float:
    """Return the CPU time of this process, of all its threads, in seconds."""
    return time.process_time()


class Stopwatch:
    """Counts the batches that it has seen; knows the time per batch between the warm-up and the last one.

    Args:
        batches: how many there will be.
        warm_up: the first that are not timed.
        now: reads the time, in seconds.
    """

    def __init__(self, batches: int, warm_up: int, now: Callable[[], float] = processor_time) -> None:
        self.batches = batches
        self.seen = 0
        self.per_batch_us = 0.0
        self._warm_up = warm_up
        self._now = now
        self._started = 0.0

    def tick(self) -> None:
        """Count one batch."""
        self.seen += 1
        if self.seen == self._warm_up:
            self._started = self._now()
        elif self.seen == self.batches:
            self.per_batch_us = (self._now() - self._started) / (self.batches - self._warm_up) * 1e6


def measure_in_turn(
    runners: Mapping[str, Callable[[Stopwatch], None]],
    make_watch: Callable[[int], Stopwatch],
    description: str | None,
    batches: int,
    left_out: Sequence[str] = (),
) -> Measured:
    """Read the command line, and measure the systems that it names; ends the process of a single measurement.

    Args:
        runners: trains with each system, ticking the stopwatch at each batch.
        make_watch: makes a stopwatch for a number of batches.
        description: what ``--help`` says.
        batches: of each measurement, by default.
        left_out: systems that cannot be run here.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=batches)
    parser.add_argument("--systems", default=",".join(runners))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        _measure_here(runners[arguments.one], make_watch(arguments.batches))
        sys.exit()
    measured: Measured = {system: [] for system in arguments.systems.split(",") if system not in left_out}
    for _ in range(arguments.rounds):
        for system, figures in measured.items():
            figures.append(_measure(system, arguments.batches))
    return measured


def _measure_here(run: Callable[[Stopwatch], None], watch: Stopwatch) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as storage:
        os.chdir(directory)
        os.environ["XDG_DATA_HOME"] = storage  # apart: Determined would copy its storage into itself
        run(watch)
        os.chdir(storage)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"RESULT {watch.per_batch_us:.2f} {peak_mib:.0f}")


def _measure(system: str, batches: int) -> tuple[float, float]:
    command = [sys.executable, sys.argv[0], "--one", system, "--batches", str(batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if done.returncode or not results:
        raise RuntimeError(f"{system} failed:\n{done.stdout}\n{done.stderr}")
    per_batch_us, peak_mib = results[0]
    return float(per_batch_us), float(peak_mib)
