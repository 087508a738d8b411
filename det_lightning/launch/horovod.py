"""``python -m det_lightning.launch.horovod [HOROVODRUN OPTIONS --] SCRIPT [ARGS]``: a script in many processes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from det_lightning.core._task import current_task
from det_lightning.launch.command_line import count_slots, find_problem, make_command, split, wants_help
from det_lightning.missing_parts import how_to_build_horovod

__path__: list[str] = []  # the import of a missing name becomes an error with the reason

_USAGE = "python -m det_lightning.launch.horovod [OPTIONS... --] SCRIPT [ARGS...]"
_HELP = f"""\
usage: {_USAGE}

Runs a training script in a process for each GPU of this machine, or in a single process without GPUs, with horovodrun,
and sets USE_HOROVOD, so that det_lightning.pytorch.init() trains with Horovod.

  SCRIPT   train.py, python train.py, -m package.module, or any other command; python is the current Python
  OPTIONS  the options of horovodrun, followed by --:
             --nproc-per-node N    number of processes on each machine
             -np N                 number of processes in all
             -H HOST:N,HOST:N      the machines, and the most processes on each
           horovodrun --help lists more. --autohorovod runs the script without horovodrun in a single process.

If a process fails, all processes are ended. SIGTERM ends all processes; horovodrun waits for 5 seconds.

  python -m det_lightning.launch.horovod --nproc-per-node 2 -- python train.py
"""

_AUTO = "--autohorovod"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default the process's own; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, script = split(given)
    if wants_help(options, given):
        print(_HELP, end="")
        return 0
    automatic = _AUTO in options or script[:1] == [_AUTO]
    options = [option for option in options if option != _AUTO]
    script = script[1:] if script[:1] == [_AUTO] else script
    if problem := find_problem(script, options, "horovodrun"):
        print(f"usage: {_USAGE}\nerror: {problem}", file=sys.stderr)
        return 2
    if (task := current_task()) is not None and len(task.container_addrs) > 1:
        print(
            f"error: the trial runs on {len(task.container_addrs)} nodes, and horovodrun would start processes on this "
            "one only. Use determined.launch.torch_distributed, or --slots N with at most the slots of a node.",
            file=sys.stderr,
        )
        return 2
    try:
        options, processes = _count_processes(options)
    except SystemExit:  # argparse has printed what is wrong
        return 2
    command = make_command(script)
    if automatic and processes == 1:
        return _execute(command, os.environ)
    if importlib.util.find_spec("horovod") is None:
        print(f"error: Horovod is not installed. {how_to_build_horovod()}", file=sys.stderr)
        return 1
    horovodrun = [sys.executable, "-m", "horovod.runner.launch"]
    return _execute([*horovodrun, *options, *command], {**os.environ, "USE_HOROVOD": "1"})


def _count_processes(options: list[str]) -> tuple[list[str], int]:
    """Return the options for horovodrun, with the number of processes among them, and that number."""
    parser = argparse.ArgumentParser(usage=_USAGE, add_help=False, allow_abbrev=False)
    counts = parser.add_mutually_exclusive_group()
    counts.add_argument("--nproc-per-node", "--nproc_per_node", dest="per_node", type=_read_count)
    counts.add_argument("-np", "--num-proc", dest="total", type=_read_count)
    parser.add_argument("-H", "--hosts", default="")
    known, others = parser.parse_known_args(options)
    processes = known.total or (known.per_node or count_slots()) * len(known.hosts.split(","))
    hosts = ["-H", known.hosts] if known.hosts else []
    return ["-np", str(processes), *hosts, *others], processes


def _read_count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return int(text)


def _execute(command: list[str], environment: Mapping[str, str]) -> int:
    if os.name == "posix":
        # Replaces this process, so that no signals need to be forwarded.
        sys.stdout.flush()
        os.execvpe(command[0], command, environment)
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
