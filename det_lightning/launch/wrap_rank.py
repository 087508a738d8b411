"""``python -m det_lightning.launch.wrap_rank RANK COMMAND``: run a command and mark the lines with the rank."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO

__path__: list[str] = []  # the import of a missing name becomes an error with the reason

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
_RANK_HELP = "the rank, or names of variables with the rank, separated by commas: the first set variable counts"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and begin each line of output with ``[rank=RANK]``; return the exit status of the command."""
    parser = argparse.ArgumentParser(prog="python -m det_lightning.launch.wrap_rank", description=main.__doc__)
    parser.add_argument(
        "--no-redirect-stdio", action="store_true", help="accepted, without effect: there are no containers"
    )
    parser.add_argument("rank", metavar="RANK", help=_RANK_HELP)
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="the command and its arguments")
    parsed = parser.parse_args(arguments)
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    rank = _read_rank(parsed.rank)
    if rank is None:
        parser.error(
            f"RANK must be a number or the name of a variable with a number; got {parsed.rank!r}, and no variable is "
            "set"
        )
    if not command:
        parser.error("the command to run is missing")
    return _run_marked(command, rank)


def _read_rank(given: str) -> int | None:
    candidates = [given, *(os.environ[name] for name in given.split(",") if name in os.environ)]
    return next((int(text) for text in candidates if text.isascii() and text.isdigit()), None)


def _run_marked(command: list[str], rank: int) -> int:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
    )
    with _pass_on_signals(process):
        threads = [
            threading.Thread(target=_copy_lines, args=(source, target, f"[rank={rank}] "))
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status = process.wait()
    return status if status >= 0 else 128 - status


def _copy_lines(source: IO[str], target: IO[str], prefix: str) -> None:
    # In text mode lines of the pipe also end at carriage returns, which progress bars write.
    for line in source:
        target.write(prefix + line.rstrip("\n") + "\n")
        target.flush()


@contextlib.contextmanager
def _pass_on_signals(process: subprocess.Popen[str]) -> Iterator[None]:
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.signal(number, lambda number, _: process.send_signal(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
