"""What scripts/build_horovod.sh says at the end of a build that fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.warm_python import ROOT

SCRIPT = ROOT / "scripts" / "build_horovod.sh"

pytestmark = pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="there is no bash")

COMPILER = """\
WARNING: Retrying after ConnectionError: connection broken
  error: subprocess-exited-with-error
      adapter_v2.cc:23:10: fatal error: c10/cuda/CUDAStream.h: No such file or directory
      gmake: *** [Makefile:136: all] Error 2
  ERROR: Failed building wheel for horovod
"""
CMAKE = """\
  error: subprocess-exited-with-error
      CMake Error at cmake/Modules/FindCUDAToolkit.cmake:12 (message):
        No CUDA compiler was found
  ERROR: Failed building wheel for horovod
"""
DOWNLOAD = """\
ERROR: Could not find a version that satisfies the requirement horovod==0.28.1 (from versions: none)
ERROR: No matching distribution found for horovod==0.28.1
"""
KILLED = """\
      [ 40%] Building CXX object adapter_v2.cc.o
      Killed

"""


@pytest.mark.parametrize(
    ("log", "first"),
    [
        (COMPILER, "adapter_v2.cc:23:10: fatal error: c10/cuda/CUDAStream.h"),
        (CMAKE, "CMake Error at cmake/Modules/FindCUDAToolkit.cmake:12"),
        (DOWNLOAD, "ERROR: Could not find a version"),
        (KILLED, "[ 40%] Building"),
    ],
    ids=["compiler", "cmake", "download", "killed"],
)
def test_first_error_is_shown(log: str, first: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    # The function itself, as the rest of the script would begin to build.
    function = SCRIPT.read_text().split("\nreason_in() {")[1].split("\n}\n")[0]
    command = ["bash", "-euo", "pipefail", "-c", f"reason_in() {{{function}\n}}\nreason_in log"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert shown.strip().startswith(first)


def test_an_environment_without_torch_is_named(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "no-such-python"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("Horovod is NOT installed: no-such-python has no torch.")
