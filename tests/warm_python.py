"""A Python whose processes begin with Lightning and det_lightning imported, which takes longer than most of them run.

``WarmPython.executable`` is used like ``sys.executable``. It is a small program that asks a server to fork: the fork
gets its arguments, environment, directory and open files, and becomes the process; signals and the exit status are
passed on. Processes that the fork starts by ``sys.executable``, such as ranks and trials, begin like this as well.
It stands for a process whose result matters: groups of processes, parents and ``/proc`` are not those of a real one.

python -m tests.warm_python FOLDER
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: What every process of the tests has in its environment.
VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
#: Read when a process begins, which a fork does not: freed memory goes back to the system at once, so that what is
#: taken is what is used.
_OF_SERVER = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
#: What most forks import.
_BEGIN_WITH = ("det_lightning.pytorch._trainer", "det_lightning.config", "det_lightning.callbacks", "filelock", "typer")


class WarmPython:
    """Has the programs of this environment as ones that begin warm, until this process ends.

    Attributes:
        executable: what to use for ``sys.executable``.
        programs: the directory that it is in, for the ``PATH``, with ``pytest`` and the other scripts of this Python.
    """

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.executable = str(self.programs / "python")
        client = Path(__file__).with_name("warm_client.py").read_text().replace("@ADDRESS@", str(folder / "address"))
        for name in ("python", "python3", "pytest", "torchrun", "det-lightning"):
            (self.programs / name).write_text(f"#!{sys.executable} -IS\n{client}")
            (self.programs / name).chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_python", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **VARIABLES, **_OF_SERVER},
            cwd=ROOT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "the server has not started"

    def run(self, script: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a script; its environment variables are those of this process."""
        command = [self.executable, str(script.absolute()), *arguments]
        return subprocess.run(command, cwd=cwd, env={**os.environ, **VARIABLES}, capture_output=True, text=True)


@functools.cache
def start_warm_python() -> WarmPython:
    """Return the one of this process."""
    return WarmPython()


def serve(folder: Path) -> None:
    """Fork for every client, until the standard input ends."""
    import torch.distributed.launcher.api  # noqa: F401  # most of torchrun
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # The name is for a log, and looked for in the sources of all modules.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    for module in (os.environ.get("DET_LIGHTNING_PACKAGE") or "pytorch_lightning", *_BEGIN_WITH):
        importlib.import_module(module)
    # Their end would look at all of these objects, and copy the memory that they are in.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "address"))
        listening.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
            connection, _ = listening.accept()
            with connection:
                if not os.fork():
                    listening.close()
                    keep(connection, str(folder / "bin" / "python"))
                    return
    shutil.rmtree(folder)


def keep(connection: socket.socket, executable: str) -> None:
    """Start what a client asks for, pass its signals on, and answer with the exit status; in the fork, run it."""
    content, files = receive(connection)
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if not child:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (woken, waking, connection.detach()):
            os.close(descriptor)
        become(content, files, executable)
        return
    # Whoever reads what the fork writes waits for the last process that has the file open.
    for file in files:
        os.close(file)
    for number in range(3):
        os.dup2(woken, number)
    pid = 0
    while not pid:
        if connection.fileno() in select.select([connection.fileno(), woken], [], [])[0]:
            # A client that is gone was killed.
            for number in connection.recv(64) or [signal.SIGKILL]:
                os.kill(child, number)
        pid, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def receive(connection: socket.socket) -> tuple[list[str], list[int]]:
    """Return the texts and the open files that a client sends."""
    size, files, _, _ = socket.recv_fds(connection, 8, 253)
    content = bytearray()
    while len(content) < int.from_bytes(size, "big"):
        content += connection.recv(2**16)
    return [os.fsdecode(part) for part in bytes(content).split(b"\0")], files


def become(content: list[str], files: list[int], executable: str) -> None:
    """Become the process that a client stands for, and run its program."""
    cwd, numbers, count, *rest = content
    arguments, variables = rest[: int(count)], rest[int(count) :]
    # First out of the way of each other.
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512) for file in files]
    for number, file in zip(numbers.split(), moved, strict=True):
        os.dup2(file, int(number))
    for file in {*files, *moved} - {*map(int, numbers.split())}:
        os.close(file)
    os.chdir(cwd)
    own_path = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(dict(variable.split("=", 1) for variable in variables))
    sys.executable = executable
    tempfile.tempdir = None  # TMPDIR may be another
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*added, *(path for path in sys.path[1:] if path not in own_path)]
    status: Any = 0
    try:
        run(arguments)
    except SystemExit as end:
        status = 0 if end.code is None else end.code
        if not isinstance(status, int):
            raise
    leave(status)


def leave(status: int) -> None:
    """End with Python's status, but finalize nothing, which would copy the memory that all modules are in.

    Open files that nobody closed are not written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            status = 120  # as Python does
    os._exit(status & 255)


def run(arguments: list[str]) -> None:
    """Run a program as ``python`` does with these arguments."""
    while arguments[0] in ("-u", "-B"):
        sys.stdout.reconfigure(write_through=arguments[0] == "-u")
        arguments = arguments[1:]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).absolute().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
