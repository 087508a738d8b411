"""Measures systems block by block, in turn: each in a process of its own, of which one at a time runs.

A machine whose speed drifts, or that others use too, slows down neighbouring blocks of all systems alike, so that their
differences can be told apart from its noise.
"""

from __future__ import annotations

import cProfile
import dataclasses
import logging
import os
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Blocks", "CallCounter", "Stopwatch", "Watch", "peak_mib", "run_blocks", "run_in_turn"]


class Watch(Protocol):
    """What a training tells of each of its batches, of which it trains ``batches``; ``seen`` are done."""

    batches: int
    seen: int

    def tick(self) -> None:
        """Count one batch."""


class Stopwatch:
    """Ticked once per batch; reports the CPU time of each block of batches, and waits for its turn before the next.

    CPU time is that of all threads of the process.

    Args:
        warm_up: number of batches before the first block.
        blocks: number of blocks.
        length: number of batches of a block.
    """

    def __init__(self, warm_up: int, blocks: int, length: int) -> None:
        self.batches = warm_up + blocks * length
        self.seen = 0
        self._length = length
        self._block_end = warm_up
        self._started = 0.0

    def tick(self) -> None:
        """Count one batch."""
        self.seen += 1
        if self.seen == self._block_end:
            self._end_block()

    def _end_block(self) -> None:
        ended = time.process_time()
        per_batch_us = (ended - self._started) / self._length * 1e6
        print(f"BLOCK {per_batch_us:.3f} {peak_mib():.1f}", flush=True)
        # Not once it goes on: what other threads do meanwhile belongs to the next block.
        self._started = ended
        self._block_end += self._length
        if self.seen < self.batches:
            sys.stdin.readline()


class CallCounter:
    """Ticked once per batch; reports how many functions were called for each, of Python and of C.

    That is one block, and unlike a time the same whenever it is measured.

    Args:
        warm_up: number of batches before those that count.
        length: number of batches that count.
    """

    def __init__(self, warm_up: int, length: int) -> None:
        self.batches = warm_up + length
        self.seen = 0
        self._warm_up = warm_up
        self._length = length
        self._profile = cProfile.Profile()

    def tick(self) -> None:
        """Count one batch."""
        self.seen += 1
        if self.seen == self._warm_up:
            print("BLOCK 0 0", flush=True)
            sys.stdin.readline()
            self._profile.enable()
        elif self.seen == self.batches:
            self._profile.disable()
            calls: int = pstats.Stats(self._profile).total_calls  # type: ignore[attr-defined]
            print(f"BLOCK {calls / self._length:.2f} {peak_mib():.1f}", flush=True)


def peak_mib() -> float:
    """Return the peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclasses.dataclass
class Blocks:
    """What was measured of a system: a figure per batch, of each block, and the peak memory in MiB.

    The figure is the time in microseconds of a :class:`Stopwatch`, or the calls of a :class:`CallCounter`.
    """

    per_batch: list[float] = dataclasses.field(default_factory=list)
    peak_mib: float = 0.0

    def added_to(self, plain: Blocks) -> float:
        """Return the median of the differences from the block of ``plain`` of the same turn."""
        return statistics.median(own - other for own, other in zip(self.per_batch, plain.per_batch, strict=True))


def run_in_turn(
    script: str, systems: Sequence[str], blocks: int, launches: int = 1, options: Sequence[str] = ()
) -> dict[str, Blocks]:
    """Run ``script --one SYSTEM --blocks N`` for each system at once, and let each run a block at a time.

    How a process happens to lie in memory makes all of its blocks faster or slower, hence the ``launches``.

    Args:
        script: path of the script, which calls :func:`run_blocks`.
        systems: what to measure.
        blocks: number of blocks of each process.
        launches: number of processes of each system, one after another.
        options: further arguments of the script.

    Raises:
        RuntimeError: a system failed; what it wrote is in the message.
    """
    measured = {system: Blocks() for system in systems}
    for _ in range(launches):
        _run_once(script, blocks, options, measured)
    return measured


def _run_once(script: str, blocks: int, options: Sequence[str], measured: dict[str, Blocks]) -> None:
    systems = list(measured)
    runners = {system: _Runner([script, "--one", system, "--blocks", str(blocks), *options]) for system in systems}
    try:
        for runner in runners.values():
            runner.next_block()  # the warm-up
        for block in range(blocks):
            # Each comes after another one in the next turn: a block leaves the caches to the one that follows.
            first = block % len(systems)
            for system in (*systems[first:], *systems[:first]):
                per_batch, measured[system].peak_mib = runners[system].next_block()
                measured[system].per_batch.append(per_batch)
    finally:
        for runner in runners.values():
            runner.close()


class _Runner:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._output: list[str] = []
        self._begun = False
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def next_block(self) -> tuple[float, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._begun:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self._begun = True
        for line in self._process.stdout:
            if line.startswith("BLOCK "):
                _, per_batch, peak = line.split()
                return float(per_batch), float(peak)
            self._output.append(line)
        raise RuntimeError(f"{' '.join(self._command)} failed:\n{''.join(self._output)}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def run_blocks(run: Callable[[Watch], None], watch: Watch) -> None:
    """Run a system in this process, in directories of its own, without its log."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as storage:
        os.chdir(directory)
        os.environ["XDG_DATA_HOME"] = storage  # apart: Determined would copy its storage into itself
        run(watch)
        os.chdir(storage)
