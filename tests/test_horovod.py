"""``determined.horovod.hvd`` stands for horovod.torch. tests/distributed/horovod trains with the real one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning.horovod import hvd

SCRIPT = """
from det_lightning import compat
compat.install()
from determined.horovod import hvd
hvd.require_horovod_type("torch", "a trial uses it")
print(hvd.size(), hvd.allgather("tensor", "name"), hasattr(hvd, "other"))
"""


def test_names_are_those_of_horovod_torch(tmp_path: Path) -> None:
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "torch.py").write_text("size = lambda: 2\nallgather = lambda *given: given\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "2 ('tensor', 'name') False\n"


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
def test_missing_horovod_gives_advice() -> None:
    with pytest.raises(ImportError, match=r"hvd\.rank needs Horovod.*context\.distributed has rank, size"):
        hvd.rank()


def test_other_horovods_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be 'torch', .*; got 'tensorflow\.keras': a callback needs it"):
        hvd.require_horovod_type("tensorflow.keras", "a callback needs it")
