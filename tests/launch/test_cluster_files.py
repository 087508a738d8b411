"""The files for clusters in docs/cluster, as far as one machine can run them."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from det_lightning.ranks.topology import free_port
from tests.launching import environment
from tests.warm_python import WarmPython

pytestmark = pytest.mark.slow

CLUSTER = Path(__file__).resolve().parents[2] / "docs" / "cluster"

#: What the scripts find in place of SLURM's commands: they run what they are given here, and note what was asked for.
SLURM = {
    "srun": '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": '#!/bin/bash\n[ "$1" = show ] && echo localhost || echo "$@" >> asked\n',
}


@pytest.fixture
def tools(warm_python: WarmPython, tmp_path: Path) -> dict[str, str]:
    """The environment of a job, with this python first."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, script in {**SLURM, "python": f'#!/bin/bash\nexec {warm_python.executable} "$@"\n'}.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return environment(PATH=os.pathsep.join([str(folder), os.environ["PATH"]]))


def run(command: list[str], folder: Path, script: str, variables: dict[str, str]) -> int:
    (folder / "train.py").write_text(script)
    done = subprocess.run(command, cwd=folder, env=variables, timeout=120, check=False)
    return done.returncode


@pytest.mark.parametrize(("status", "asked"), [(75, "requeue 7\n"), (0, ""), (3, "")])
def test_slurm_queues_a_run_again_that_was_saved(
    status: int, asked: str, tools: dict[str, str], tmp_path: Path
) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "SLURM_GPUS_ON_NODE": "1"}
    # With restarts a process that fails takes its time.
    text = (CLUSTER / "slurm.sbatch").read_text().replace("--max-restarts 3", "--max-restarts 0")
    text = text.replace(":29400", f":{free_port()}")
    (tmp_path / "job.sbatch").write_text(text)
    assert run(["bash", "job.sbatch", "train.py"], tmp_path, f"raise SystemExit({status})", {**tools, **job}) == status
    noted = tmp_path / "asked"
    assert (noted.read_text() if noted.exists() else "") == asked


@pytest.mark.parametrize(("status", "expected"), [("75", 143), ("0", 0)])
def test_kubernetes_restarts_a_saved_pod(status: str, expected: int, tools: dict[str, str], tmp_path: Path) -> None:
    job = YAML(typ="safe").load(CLUSTER / "pytorchjob.yaml")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert container == replicas["Master"]["template"]["spec"]["containers"][0]
    place = {"PET_NODE_RANK": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}
    variables = {**tools, **place, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = [*container["command"], container["args"][0].replace("--max-restarts 3", "--max-restarts 0")]
    assert run(command, tmp_path, f"raise SystemExit({status})", variables) == expected


def test_the_script_for_ray_is_python() -> None:
    ast.parse((CLUSTER / "ray_train.py").read_text())
