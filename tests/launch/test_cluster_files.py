"""The files for clusters in docs/cluster, as far as one machine can run them."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from det_lightning.ranks.topology import free_port
from tests.experiments.running import wait_for
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


#: They note how they were started; the experiment runs until it is stopped, and is complete when it is resumed.
EXPERIMENT = {
    "ray": '#!/bin/bash\necho "ray $*" >> asked\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n',
    "det-lightning": """#!/bin/bash
echo "$@" >> asked
case "$1 $2" in
    "run adaptive.yaml")
        mkdir -p "$4/search-1"
        until [ -e stop ]; do sleep 0.1; done
        exit 130 ;;
    "experiment stop") touch stop ;;
esac
""",
}


def test_slurm_resumes_an_experiment_on_ray(tools: dict[str, str], tmp_path: Path) -> None:
    for name, script in EXPERIMENT.items():
        (tmp_path / "tools" / name).write_text(script)
        (tmp_path / "tools" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "SLURM_CPUS_PER_TASK": "2"}
    variables = {**tools, **job}
    with subprocess.Popen(["bash", CLUSTER / "ray.sbatch", "adaptive.yaml"], cwd=tmp_path, env=variables) as batch:
        experiments = tmp_path / "experiments" / "job-7"
        wait_for((experiments / "search-1").exists)
        batch.send_signal(signal.SIGUSR1)
        assert batch.wait(timeout=60) == 130
    assert run(["bash", str(CLUSTER / "ray.sbatch"), "adaptive.yaml"], tmp_path, "", variables) == 0
    started = "ray symmetric-run --address localhost:6379 --min-nodes 1 --num-cpus 2 -- det-lightning"
    begun = f"run adaptive.yaml --experiments {experiments} --ray auto"
    resumed = f"experiment resume {experiments}/search-1 --ray auto"
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"{started} {begun}",
        begun,
        f"experiment stop {experiments}/search-1",
        "requeue 7",
        f"{started} {resumed}",
        resumed,
    ]


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
