"""Trials larger than a node, on a Ray cluster of several nodes on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.overview import describe_experiment
from tests.experiments.ray.conftest import CLUSTER_VARIABLE, NAMES, add_node, end_node
from tests.experiments.running import (
    events_of,
    kill,
    pids_of,
    processes_with,
    run,
    run_until,
    start,
    wait_for,
    write_project,
)
from tests.experiments.test_trial_classes import CONFIG, run_experiment, weights_in

pytestmark = pytest.mark.slow

SLOTS: dict[str, Any] = {"resources": {"slots_per_trial": 4}}
# A shell's word for the rank of its node.
RANK = "$(basename $(dirname $PWD))"


def write_linear(folder: Path, script: str = "waiting_trial.py", **sections: Any) -> Path:
    """Write a project of four slots whose first run waits at its sixth batch, and return its configuration."""
    folder.mkdir()
    for name in ("linear_trial.py", f"ray/{script}"):
        shutil.copy(Path(__file__).parents[1] / name, folder)
    config = {**CONFIG, **SLOTS, "entrypoint": "waiting_trial:WaitingTrial", "min_checkpoint_period": {"batches": 2}}
    (folder / "config.yaml").write_text(json.dumps({**config, "max_restarts": 1, **sections}))
    return folder / "config.yaml"


def read_results(experiment: Path) -> tuple[list[tuple[int, Any]], dict[str, torch.Tensor]]:
    """Return the validations of the only trial, and its weights in the end."""
    validations = [(event["steps_completed"], event["metrics"]) for event in events_of(experiment, "validation")]
    newest = max(events_of(experiment, "checkpoint"), key=lambda event: event["steps_completed"])
    return sorted(validations), weights_in(experiment / "checkpoints" / newest["checkpoint_id"])


def assert_equal_results(experiment: Path, expected: Path, tolerance: float = 0.0) -> None:
    """Compare the results of two trials, to the bit, or as exactly as sums of another order are."""
    validations, weights = read_results(experiment)
    expected_validations, expected_weights = read_results(expected)
    for (steps, metrics), (expected_steps, expected_metrics) in zip(validations, expected_validations, strict=True):
        assert steps == expected_steps
        assert metrics == pytest.approx(expected_metrics, rel=tolerance, abs=0)
    torch.testing.assert_close(weights, expected_weights, rtol=tolerance, atol=0)


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same trial in four processes of this machine."""
    return run_experiment(tmp_path_factory.mktemp("one"), "--cpu", is_warm=False, **SLOTS)


def test_script_is_told_of_its_nodes(cluster: Any, tmp_path: Path) -> None:
    script = """
import os
import determined as det
info = det.get_cluster_info()
print("rank", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["DET_SLOT_IDS"],
      info.slot_ids, info.container_rank, info.container_slot_counts, len(info.container_addrs),
      os.environ["DET_CHIEF_IP"] == info.container_addrs[0] == os.environ["MASTER_ADDR"], os.getcwd())
"""
    entrypoint = "echo on $DET_SLOT_IDS; python3 -m determined.launch.torch_distributed ranks.py"
    config = write_project(tmp_path / "project", entrypoint=entrypoint, **SLOTS)
    (tmp_path / "project" / "ranks.py").write_text(script)
    run("run", config, tmp_path / "project", "--experiments", tmp_path, "--cpu", "--ray", cluster.address)
    printed = run("experiment", "logs", tmp_path / "small-1", 1).stdout.splitlines()
    nodes = tmp_path / "small-1" / "trials" / "1" / "nodes"
    told = [
        f"[rank={rank}] rank {rank} 4 {rank % 2} [0, 1] [0, 1] {rank // 2} [2, 2] 2 True {nodes}/{rank // 2}/workdir"
        for rank in range(4)
    ]
    assert sorted(line for line in printed if "rank" in line) == told
    assert sorted(line for line in printed if " on " in line) == [f"[node={rank}] on [0, 1]" for rank in range(2)]


@pytest.mark.parametrize("entrypoint", ["linear_trial:LinearTrial", "script"])
def test_results_are_those_of_one_node(entrypoint: str, cluster: Any, tmp_path: Path, on_one_node: Path) -> None:
    command = "python3 -m determined.launch.torch_distributed python3 -m determined.exec.harness"
    if entrypoint == "script":
        entrypoint = f"{command} linear_trial:LinearTrial"
    options = ("--cpu", "--ray", cluster.address)
    experiment = run_experiment(tmp_path, *options, is_warm=False, entrypoint=entrypoint, **SLOTS)
    assert_equal_results(experiment, on_one_node)
    assert len(events_of(experiment, "run_placed")[0]["nodes"]) == 2
    assert pids_of(experiment) == []


def test_trial_of_a_dead_node_goes_on(cluster: Any, tmp_path: Path, on_one_node: Path) -> None:
    config = write_linear(tmp_path / "project")
    experiment = tmp_path / "linear-1"
    process = start("run", config, config.parent, "--experiments", tmp_path, "--cpu", "--ray", cluster.address)
    wait_for(lambda: len(events_of(experiment, "checkpoint")) >= 2, timeout_s=120)
    shown = describe_experiment(ExperimentDirectory(experiment))["trials"][0]["nodes"]
    assert sorted(shown) == [*NAMES]
    end_node(cluster, NAMES[0], experiment / "trials" / "1" / "nodes" / str(shown.index(NAMES[0])))
    wait_for(lambda: len(events_of(experiment, "run_ended")) == 1)
    assert pids_of(experiment) == []
    wait_for(lambda: len(events_of(experiment, "message")) == 1)
    assert "waits for 2 nodes with 2 CPUs each" in events_of(experiment, "message")[0]["text"]
    add_node(cluster, cpus=2, node_name=NAMES[0])
    process.communicate(timeout=120)
    assert process.returncode == 0
    # DDP sums the first gradients of a run in another order.
    assert_equal_results(experiment, on_one_node, tolerance=1e-5)
    assert describe_experiment(ExperimentDirectory(experiment))["trials"][0]["nodes"] == []


def write_shell(folder: Path, entrypoint: str, **sections: Any) -> Path:
    """Write a project of four slots with a shell command for an entrypoint."""
    return write_project(folder / "project", entrypoint=entrypoint, **{**SLOTS, **sections})


def test_failure_on_one_node_ends_the_others(cluster: Any, tmp_path: Path) -> None:
    entrypoint = f"echo run; if [ {RANK} = 1 ]; then sleep 1; echo broken; exit 5; fi; trap '' TERM; sleep 600; true"
    config = write_shell(tmp_path, entrypoint, max_restarts=1)
    experiment = tmp_path / "small-1"
    options = ("--cpu", "--experiments", tmp_path, "--ray", cluster.address)
    run("run", config, config.parent, *options, ends_with=1, timeout_s=200)
    ends = events_of(experiment, "run_ended")
    assert [(end["status"], end["closed"]) for end in ends] == [(5, None), (5, "ERROR")]
    assert (experiment / "trials" / "1" / "log.txt").read_text().count("[node=1] broken\n") == 2
    assert pids_of(experiment) == []


def test_lost_actor_ends_the_trial_on_all_nodes(cluster: Any, tmp_path: Path) -> None:
    config = write_shell(tmp_path, f"echo on {RANK}; trap '' TERM; sleep 600; true")
    experiment = tmp_path / "small-1"
    options = ("--cpu", "--experiments", tmp_path, "--ray", cluster.address)
    process = start("run", config, config.parent, *options)
    log = experiment / "trials" / "1" / "log.txt"
    wait_for(lambda: log.exists() and log.read_text().count(" on ") == 2)
    of_cluster = processes_with(f"{CLUSTER_VARIABLE}={os.getpid()}")
    actor = next(one for one in of_cluster if Path(f"/proc/{one}/cmdline").read_bytes().startswith(b"ray::TrialActor"))
    os.kill(actor, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 1
    (end,) = events_of(experiment, "run_ended")
    assert "Ray lost the run: ActorDiedError" in end["reason"]
    assert pids_of(experiment) == []


def test_interrupt_saves_on_all_nodes(cluster: Any, tmp_path: Path) -> None:
    endless = {**CONFIG["searcher"], "max_length": {"batches": 10**6}}
    config = write_linear(tmp_path / "project", entrypoint="linear_trial:LinearTrial", searcher=endless)
    experiment = tmp_path / "linear-1"
    options = ("--cpu", "--experiments", tmp_path, "--ray", cluster.address)
    run_until(lambda: len(events_of(experiment, "validation")) >= 2, "run", config, config.parent, *options)
    (end,) = events_of(experiment, "run_ended")
    assert (end["status"], end["paused"]) == (75, True)
    assert events_of(experiment, "checkpoint")[-1]["steps_completed"] == end["steps_completed"]
    assert pids_of(experiment) == []


def test_trial_goes_on_in_another_shape(cluster: Any, tmp_path: Path, on_one_node: Path) -> None:
    config = write_linear(tmp_path / "project")
    experiment = tmp_path / "linear-1"

    def has_saved() -> bool:
        return len(events_of(experiment, "checkpoint")) >= 2

    options = ("--cpu", "--experiments", tmp_path, "--ray", cluster.address)
    run_until(has_saved, "run", config, config.parent, *options, "--config", "preemption_timeout=5")
    assert [event["paused"] for event in events_of(experiment, "run_ended")] == [True]
    assert pids_of(experiment) == []
    large = add_node(cluster, cpus=4, node_name="large")
    run("experiment", "resume", experiment, "--ray", cluster.address, timeout_s=200)
    cluster.remove_node(large)
    assert [event["nodes"] for event in events_of(experiment, "run_placed")][1:] == [["large"]]
    assert_equal_results(experiment, on_one_node, tolerance=1e-5)


def test_killed_runner_ends_the_trial_on_all_nodes(cluster: Any, tmp_path: Path) -> None:
    waits = f"echo on {RANK}; trap 'echo saved; exit 75' TERM; [ -e go ] || while true; do sleep 0.1; done"
    config = write_shell(tmp_path, waits)
    experiment = tmp_path / "small-1"
    options = ("--cpu", "--experiments", tmp_path, "--ray", cluster.address)
    process = start("run", config, config.parent, *options)
    log = experiment / "trials" / "1" / "log.txt"
    wait_for(lambda: log.exists() and log.read_text().count(" on ") == 2)
    kill(process)
    wait_for(lambda: pids_of(experiment) == [])
    assert describe_experiment(ExperimentDirectory(experiment))["trials"][0]["state"] == "PAUSED"
    (experiment / "code" / "go").touch()
    run("experiment", "resume", experiment, "--ray", cluster.address)
    assert log.read_text().count("saved") == 2
    assert [event["status"] for event in events_of(experiment, "run_ended")] == [75, 0]


def test_trials_wait_for_their_places(cluster: Any, tmp_path: Path) -> None:
    searcher = {"name": "random", "metric": "loss", "max_trials": 2, "max_concurrent_trials": 2}
    small = write_project(tmp_path / "small", hyperparameters={"waits_at": [1]}, searcher=searcher)
    options = ("--experiments", tmp_path, "--ray", cluster.address, "--cpu")
    process = start("run", small, small.parent, *options, "--config", "resources.max_slots=1")
    wait_for(lambda: len(events_of(tmp_path / "small-1", "validation")) == 1)
    large = write_shell(tmp_path, "true", searcher=searcher)
    waiting = start("run", large, large.parent, *options)
    wait_for(lambda: len(events_of(tmp_path / "small-2", "message")) == 1)
    (message,) = events_of(tmp_path / "small-2", "message")
    waits_for = "Trial 1 waits for 2 nodes with 2 CPUs each that are free at the same time. The nodes are "
    assert message["text"].startswith(waits_for)
    assert "first with 2 CPUs, second with 2 CPUs" in message["text"]
    assert len(events_of(tmp_path / "small-1", "run_started")) == 1
    process.send_signal(signal.SIGINT)
    waiting.communicate(timeout=60)
    assert process.wait(timeout=60) == 130
    assert waiting.returncode == 0
    assert len(events_of(tmp_path / "small-2", "run_placed")) == 2
