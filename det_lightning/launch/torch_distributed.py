"""``python -m det_lightning.launch.torch_distributed [OPTIONS --] SCRIPT [ARGS]``: a script in many processes."""

from __future__ import annotations

import argparse
import copy
import os
import signal
import sys
from collections.abc import Sequence

from det_lightning.core._task import current_task
from det_lightning.errors import PREEMPTED_EXIT_CODE
from det_lightning.launch.command_line import count_slots, find_problem, make_command, split, wants_help
from det_lightning.ranks.topology import free_port

__path__: list[str] = []  # the import of a missing name becomes an error with the reason

_USAGE = "python -m det_lightning.launch.torch_distributed [TORCHRUN OPTIONS... --] SCRIPT [ARGS...]"
_HELP = f"""\
usage: {_USAGE}

Runs a training script in a process for each GPU of this machine, or in a single process without GPUs, with torchrun.

  SCRIPT   train.py, python train.py, -m package.module, or any other command; python is the current Python
  OPTIONS  the options of torchrun, followed by --:
             --nproc-per-node N    number of processes on this machine
             --nnodes N            number of machines; start the launcher on each machine
             --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME
                                   rendezvous of several machines, with a name
             --max-restarts N      restart all processes if one fails, at most N times
             --shutdown-timeout S  seconds for saving after a signal, before processes are killed; 30 by default
           torchrun --help lists more.

SIGTERM and SIGUSR1 are passed on: all processes save and end, and the launcher ends with status {PREEMPTED_EXIT_CODE}.
If a process fails, the launcher ends with the status of the process, or 128 + N if killed by signal N.

  python -m det_lightning.launch.torch_distributed train.py --epochs 10
  python -m det_lightning.launch.torch_distributed --nproc-per-node 2 --max-restarts 3 -- python train.py
"""

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
#: The signals that ask a run to save and end; see ``det_lightning.callbacks.PreemptionHandler``.
_PREEMPTING = ("SIGTERM", "SIGUSR1")
#: How torchrun ended, with the store of its rendezvous: destroying the store has aborted a launcher that was done.
_endings: list[Exception] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default the process's own; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, script = split(given)
    if wants_help(options, given):
        print(_HELP, end="")
        return 0
    if problem := find_problem(script, options, "torchrun"):
        print(f"usage: {_USAGE}\nerror: {problem}", file=sys.stderr)
        return 2
    return _launch(options, make_command(script))


def _launch(options: list[str], command: list[str]) -> int:
    """Run the command with torchrun, in this process, so that no signals need to be forwarded."""
    from torch.distributed import run  # takes a second, which --help or a mistake should not cost
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    nodes, command = _place_on_nodes(command)
    try:
        parsed = run.parse_args([*nodes, *options, "--no-python", "--", *command])  # type: ignore[no-untyped-call]
        if not _is_given("nproc-per-node", options):
            parsed.nproc_per_node = str(count_slots())
        if not _is_given("signals-to-handle", options) and hasattr(signal, "SIGUSR1"):
            parsed.signals_to_handle = _SIGNALS
        run.config_from_args(copy.deepcopy(parsed))  # raises for invalid values
    except SystemExit as error:  # argparse has printed what is wrong
        return int(error.code or 0)
    except (AssertionError, ValueError) as error:
        print(f"usage: {_USAGE}\nerror: {error}", file=sys.stderr)
        return 2
    _prepare_environment(parsed)
    try:
        run.run(parsed)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _endings.append(error)
        _, failure = error.get_first_failure()
        if failure.exitcode != PREEMPTED_EXIT_CODE:
            print(error, file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        _endings.append(error)
        preempted = error.sigval.name in _PREEMPTING
        return PREEMPTED_EXIT_CODE if preempted else 128 + error.sigval
    return 0


def _place_on_nodes(command: list[str]) -> tuple[list[str], list[str]]:
    """Return torchrun's options for this node of a trial on several nodes, and the command, which then marks its lines.

    As in Determined, the first node has the rendezvous, at the port in ``C10D_PORT``.
    """
    task = current_task()
    if task is None or len(task.container_addrs) == 1:
        return [], command
    options = {
        "--nnodes": len(task.container_addrs),
        "--node-rank": task.container_rank,
        "--master-addr": task.container_addrs[0],
        "--master-port": os.environ.get("C10D_PORT", "29400"),
    }
    marked = [sys.executable, "-m", "det_lightning.launch.wrap_rank", "RANK", "--", *command]
    return [f"{name}={value}" for name, value in options.items()], marked


def _prepare_environment(parsed: argparse.Namespace) -> None:
    """Set the environment variables for the processes of the script, and for torchrun."""
    os.environ["USE_TORCH_DISTRIBUTED"] = "True"
    if (task := current_task()) is not None:
        # Scripts set up DeepSpeed or a Lightning cluster environment with the address.
        os.environ.setdefault("DET_CHIEF_IP", task.container_addrs[0])
    if parsed.max_restarts > 0:
        # Otherwise restarted processes find the addresses of dead ones, see pytorch/pytorch issues 135712 and 167288.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if parsed.nnodes in ("1", "1:1"):
            # Without the shared store each DistributedContext runs a store; runs on a machine need different ports.
            os.environ.setdefault("INTER_TRAIN_PROCESS_COMM_PORT_1", str(free_port("127.0.0.1")))


def _is_given(name: str, options: list[str]) -> bool:
    """Return whether an option was given, on the command line or in torchrun's environment variable."""
    if f"PET_{name.replace('-', '_').upper()}" in os.environ:
        return True
    return any(option.replace("_", "-").split("=")[0] == f"--{name}" for option in options)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without destroying what torchrun left behind, see _endings
