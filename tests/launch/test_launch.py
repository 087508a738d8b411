"""The launcher of torch.distributed: its command line, and what it passes on."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from det_lightning.core._task import TASK_VARIABLE, TrialTask
from det_lightning.launch import horovod
from det_lightning.launch.torch_distributed import main
from det_lightning.ranks.topology import free_port
from tests.launching import environment
from tests.warm_python import start_warm_python

# Each line is written at once: the processes share a pipe.
SHOW = (
    "import os, sys; topology = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'USE_TORCH_DISTRIBUTED')]; "
    r"sys.stdout.write(' '.join(topology) + '\n')"
)


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [start_warm_python().executable, "-m", "det_lightning.launch.torch_distributed", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment(**variables), check=False
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script to run"),
        (["--nnodes", "2", "train.py"], "--nnodes is an option of torchrun: put -- between"),
        (["--nnodes", "2", "--", "--max-restarts", "3"], "--max-restarts is an option of torchrun: it must come"),
        (["-m"], "-m needs the name of a module"),
        (["absent.py"], "there is no script absent.py"),
        (["--trial", "model_def:MyTrial"], "--trial works in experiments only"),
        (["--nnodes", "many", "--", "python", "-c", ""], "'many'"),
        (["--nproc-per-node", "many", "--", "python", "-c", ""], "many"),
        (["--bogus", "--", "python", "-c", ""], "unrecognized arguments: --bogus"),
    ],
)
def test_bad_input_is_named_and_ends_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--nnodes", "2", "--help", "--", "train.py"]])
def test_help_names_the_options_of_torchrun(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "--nproc-per-node" in capsys.readouterr().out


@pytest.mark.slow
def test_script_or_module_runs_on_each_rank(tmp_path: Path) -> None:
    (tmp_path / "show_topology.py").write_text(SHOW + r"; sys.stdout.write(f'{sys.argv[1:]}\n')")
    given = ["--help", "--num", "--", "x"]  # torchrun has several options that begin with --num
    as_python = launch("--nproc-per-node", "2", "--", "python", str(tmp_path / "show_topology.py"), *given)
    assert as_python.returncode == 0, as_python.stderr
    assert sorted(as_python.stdout.splitlines()) == ["0 2 True", "1 2 True", *2 * [str(given)]]
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    as_module = launch("-m", "show_topology", PYTHONPATH=paths)
    assert as_module.stdout.splitlines()[-1] == "[]", as_module.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("given", "address"), [({}, "127.0.0.1"), ({"DET_CHIEF_IP": "10.0.0.1"}, "10.0.0.1")])
def test_experiment_script_finds_the_chief(given: dict[str, str], address: str, tmp_path: Path) -> None:
    task = TrialTask(tmp_path, 1, 1, 1, 0, hparams={}, config={}, slots=[0], checkpoint_storage=str(tmp_path))
    task.write()
    show = "import os; print(os.environ['DET_CHIEF_IP'])"
    assert launch("python", "-c", show, **{TASK_VARIABLE: str(task.file)}, **given).stdout == f"{address}\n"


@pytest.mark.slow
def test_nodes_of_a_trial_meet(tmp_path: Path) -> None:
    task = TrialTask(tmp_path, 1, 1, 1, 0, hparams={}, config={}, slots=[0], checkpoint_storage=str(tmp_path))
    show = "import os; print('of', os.environ['WORLD_SIZE'], 'on', os.environ['GROUP_RANK'], os.environ['MASTER_PORT'])"
    port = str(free_port("127.0.0.1"))

    def launch_node(rank: int) -> str:
        node = dataclasses.replace(task, container_addrs=["127.0.0.1", "127.0.0.1"], container_rank=rank)
        node.node_directory.mkdir(parents=True)
        node.write()
        return launch("python", "-c", show, **{TASK_VARIABLE: str(node.file), "C10D_PORT": port}).stdout

    with concurrent.futures.ThreadPoolExecutor() as pool:
        printed = list(pool.map(launch_node, range(2)))
    assert printed == [f"[rank={rank}] of 2 on {rank} {port}\n" for rank in range(2)]


def test_horovod_refuses_several_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes: dict[str, Any] = {"container_addrs": ["127.0.0.1", "127.0.0.2"], "container_rank": 1}
    task = TrialTask(tmp_path, 1, 1, 1, 0, {}, config={}, slots=[0], checkpoint_storage=str(tmp_path), **nodes)
    task.node_directory.mkdir(parents=True)
    task.write()
    monkeypatch.setenv(TASK_VARIABLE, str(task.file))
    assert horovod.main(["python", "-c", "pass"]) == 2
    assert "the trial runs on 2 nodes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("sys.exit(75)", 75)]
)
def test_status_of_a_failure_is_passed_on(does: str, status: int) -> None:
    script = f"import os, sys\nif os.environ['RANK'] == '0': {does}"
    assert launch("python", "-c", script).returncode == status
