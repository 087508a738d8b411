"""Scripts in processes of their own that begin with Lightning imported, which takes longer than most of them run.

python -m tests.warm_python
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.launching import environment


class WarmPython(contextlib.AbstractContextManager["WarmPython"]):
    """Runs scripts as ``python script.py`` does, each in a fork of a process that has imported Lightning."""

    def __init__(self, folder: Path) -> None:
        self._files = {name: folder / name for name in ("stdout", "stderr")}
        command = [sys.executable, "-m", "tests.warm_python"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def __exit__(self, *error: object) -> None:
        with self._process:
            pass

    def run(self, script: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a script; its environment variables are those of this process."""
        assert self._process.stdin is not None and self._process.stdout is not None, "it is started with pipes"
        command = [str(script.absolute()), *arguments]
        files = {name: str(file) for name, file in self._files.items()}
        request = {"command": command, "cwd": str(cwd), "environment": environment(), **files}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(
            command, status, *(self._files[name].read_text() for name in ("stdout", "stderr"))
        )


def serve() -> None:
    """Run what the standard input asks for, one script after another."""
    import pytorch_lightning  # noqa: F401  # what all forks begin with

    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(**json.loads(line))
            return  # and end as a script ends
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(command: list[str], cwd: str, environment: dict[str, str], stdout: str, stderr: str) -> None:
    """Become the process of a script, and run it."""
    for descriptor, (path, mode) in enumerate([(os.devnull, "r"), (stdout, "w"), (stderr, "w")]):
        with Path(path).open(mode) as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    serve()
