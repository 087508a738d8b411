"""``python -m det_lightning.launch.horovod [HOROVODRUN OPTIONS --] SCRIPT [ARGS]``: a script in many processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from det_lightning.launch.command_line import count_slots, find_problem, make_command, split, wants_help
from det_lightning.missing_parts import how_to_build_horovod

#: Makes an import of a helper of Determined's launcher raise the error that says why it is missing.
__path__: list[str] = []

_USAGE = "python -m det_lightning.launch.horovod [OPTIONS... --] SCRIPT [ARGS...]"
_HELP = f"""\
usage: {_USAGE}

Runs a training script in one process for each GPU of this machine, in one where there is none, with horovodrun, and
sets USE_HOROVOD, by which det_lightning.pytorch.init() trains with Horovod.

  SCRIPT   train.py, python train.py, -m package.module, or any other command; python is the one that runs this
  OPTIONS  those of horovodrun, and -- after them:
             --nproc-per-node N    number of processes on each machine
             -np N                 number of processes on all of them
             -H HOST:N,HOST:N      the machines, and how many processes each may run
           horovodrun --help lists the others. --autohorovod runs the script without horovodrun if it has one process.

If a process fails, the others are ended. SIGTERM ends all of them; horovodrun gives them 5 seconds.

  python -m det_lightning.launch.horovod --nproc-per-node 2 -- python train.py
"""

_PER_NODE = ("--nproc-per-node", "--nproc_per_node")
_TOTAL = ("-np", "--num-proc")
_HOSTS = ("-H", "--hosts")
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
    try:
        if problem := find_problem(script, options, "horovodrun"):
            raise ValueError(problem)
        options, processes = _count(options)
    except ValueError as error:
        print(f"usage: {_USAGE}\nerror: {error}", file=sys.stderr)
        return 2
    command = make_command(script)
    if automatic and processes == 1:
        return _execute(command, os.environ)
    if importlib.util.find_spec("horovod") is None:
        print(f"error: Horovod is not installed. {how_to_build_horovod()}", file=sys.stderr)
        return 1
    horovodrun = [sys.executable, "-m", "horovod.runner.launch"]
    return _execute([*horovodrun, *options, *command], {**os.environ, "USE_HOROVOD": "1"})


def _count(options: list[str]) -> tuple[list[str], int]:
    """Return the options, with the number of processes as horovodrun's option, and the number."""
    per_node, options = _take(options, _PER_NODE)
    total, options = _take(options, _TOTAL)
    if per_node and total:
        raise ValueError(f"{_PER_NODE[0]} {per_node} and {_TOTAL[0]} {total}: give one of them.")
    hosts, _ = _take(options, _HOSTS)
    for name, number in ((_PER_NODE[0], per_node), (_TOTAL[0], total)):
        if number is not None and not (number.isdecimal() and int(number)):
            raise ValueError(f"{name} must be a positive integer; got {number!r}.")
    nodes = len(hosts.split(",")) if hosts else 1
    processes = int(total) if total else int(per_node or count_slots()) * nodes
    return [_TOTAL[0], str(processes), *options], processes


def _take(options: list[str], names: tuple[str, ...]) -> tuple[str | None, list[str]]:
    for index, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name in names and equals:
            return value, options[:index] + options[index + 1 :]
        if name in names:
            if index + 1 == len(options):
                raise ValueError(f"{name} needs a value.")
            return options[index + 1], options[:index] + options[index + 2 :]
    return None, options


def _execute(command: list[str], environment: Mapping[str, str]) -> int:
    if os.name == "posix":
        # Replaces this process, so that no signals need to be forwarded.
        sys.stdout.flush()
        os.execvpe(command[0], command, environment)
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
