"""``--ray``: the trials of an experiment on the nodes of a Ray cluster, with real nodes and real processes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.ray.conftest import NAMES, add_node
from tests.experiments.running import (
    events_of,
    kill,
    pids_of,
    processes_with,
    run,
    start,
    wait_for,
    write_project,
)

pytestmark = pytest.mark.slow

RANDOM = {"name": "random", "metric": "loss", "max_trials": 4, "max_concurrent_trials": 4}
RANGE = {"type": "double", "minval": 0.1, "maxval": 1.0}


def created_in(experiment: Path) -> list[tuple[Any, ...]]:
    return [(event["trial"], event["seed"], event["hparams"]) for event in events_of(experiment, "trial_created")]


def validations_in(experiment: Path) -> list[tuple[Any, ...]]:
    events = events_of(experiment, "validation")
    found = [(event["trial"], event["steps_completed"], event["metrics"]) for event in events]
    return sorted(found, key=lambda validation: validation[:2])


def test_trials_are_those_of_the_local_runner(cluster: Any, tmp_path: Path) -> None:
    config = write_project(tmp_path / "project", hyperparameters={"lr": RANGE}, searcher=RANDOM)
    run("run", config, tmp_path / "project", "--experiments", tmp_path / "local")
    run("run", config, tmp_path / "project", "--experiments", tmp_path / "ray", "--ray", cluster.address)
    local = tmp_path / "local" / "small-1"
    experiment = tmp_path / "ray" / "small-1"
    assert created_in(experiment) == created_in(local)
    assert validations_in(experiment) == validations_in(local)
    assert len(validations_in(experiment)) == 20
    assert pids_of(experiment) == []


def test_trial_sees_the_gpus_from_ray(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # Ray starts no node with more GPUs than this names
    entrypoint = "echo devices $CUDA_VISIBLE_DEVICES, slots $DET_SLOT_IDS"
    config = write_project(tmp_path / "project", entrypoint=entrypoint, resources={"slots_per_trial": 2})
    node = add_node(cluster, cpus=2, gpus=2)
    run("run", config, tmp_path / "project", "--experiments", tmp_path, "--ray", cluster.address)
    run("run", config, tmp_path / "project", "--experiments", tmp_path, "--ray", cluster.address, "--cpu")
    cluster.remove_node(node)
    printed = [(tmp_path / f"small-{number}" / "trials" / "1" / "log.txt").read_text() for number in (1, 2)]
    assert printed == ["devices 0,1, slots [0, 1]\n", "devices , slots [0, 1]\n"]


def test_killed_experiment_completes_anywhere(cluster: Any, tmp_path: Path) -> None:
    hparams = {"lr": RANGE, "steps": 10, "waits_at": [3, 7]}
    config = write_project(tmp_path / "project", hyperparameters=hparams, searcher=RANDOM)
    planned = json.loads(run("run", config, "--dry-run").stdout)["trials"]
    experiment = tmp_path / "small-1"
    on_ray = ["--ray", cluster.address]
    process = start("run", config, tmp_path / "project", "--experiments", tmp_path, *on_ray)
    # Each of the four trials waits twice.
    for validations, options in ((12, on_ray), (28, ["--slots", "1"])):
        wait_for(lambda: len(events_of(experiment, "validation")) >= validations)  # noqa: B023
        kill(process)
        # At once: the trials of the dead runner may still be saving.
        process = start("experiment", "resume", experiment, *options)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert created_in(experiment) == [(trial["id"], trial["trial_seed"], trial["hparams"]) for trial in planned]
    assert [steps for _, steps, _ in validations_in(experiment)] == [*range(1, 11)] * 4
    assert {event["status"] for event in events_of(experiment, "run_ended")} <= {0, 75}
    assert pids_of(experiment) == []


def test_second_interrupt_kills(cluster: Any, tmp_path: Path) -> None:
    config = write_project(tmp_path / "project", hyperparameters={"waits_at": [1], "ignores_sigterm": True})
    experiment = tmp_path / "small-1"
    process = start("run", config, tmp_path / "project", "--experiments", tmp_path, "--ray", cluster.address)
    wait_for(lambda: len(events_of(experiment, "validation")) >= 1)
    process.send_signal(signal.SIGINT)
    assert any(line.startswith("Pausing:") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert pids_of(experiment) == []


def test_waiting_trial_can_be_interrupted(cluster: Any, tmp_path: Path) -> None:
    config = write_project(tmp_path / "project", hyperparameters={"waits_at": [1]}, searcher=RANDOM)
    arguments = ("run", config, tmp_path / "project", "--experiments", tmp_path, "--ray", cluster.address)
    first = start(*arguments)
    wait_for(lambda: len(events_of(tmp_path / "small-1", "validation")) == 4)
    second = start(*arguments)
    wait_for(lambda: len(events_of(tmp_path / "small-2", "run_started")) == 4)
    for process in (second, first):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
    assert events_of(tmp_path / "small-2", "validation") == []
    assert pids_of(tmp_path) == []


def test_node_that_died_a_moment_ago_is_passed_over(cluster: Any, tmp_path: Path) -> None:
    config = write_project(tmp_path / "project")
    cluster.remove_node(add_node(cluster, cpus=1, node_name="lost"), allow_graceful=False)
    # Ray has not noticed yet, and would take the node for one of those that must share files.
    assert [node["Alive"] for node in cluster.global_state.node_table() if node["NodeName"] == "lost"] == [True]
    run("run", config, config.parent, "--experiments", tmp_path, "--ray", cluster.address)
    assert events_of(tmp_path / "small-1", "run_placed")[0]["nodes"][0] in NAMES


@contextlib.contextmanager
def node_without(folder: Path, cluster: Any, cpus: int) -> Iterator[None]:
    """Start one more node, whose processes see an empty directory in place of ``folder``."""
    if subprocess.run(["unshare", "--mount", "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mount namespaces cannot be used here")
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", cluster.address, "--block"]
    command = [*ray_start, "--num-cpus", str(cpus)]
    mounting = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder)]
    node = subprocess.Popen([*mounting, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_alive() -> bool:
        nodes = cluster.global_state.node_table()
        return any(found["Alive"] and found["Resources"].get("CPU") == cpus for found in nodes)

    try:
        wait_for(is_alive)
        yield
    finally:
        node.terminate()
        node.wait()


def test_nodes_without_shared_files_are_named(cluster: Any, tmp_path: Path) -> None:
    config = write_project(tmp_path / "project")
    hidden = tmp_path / "experiments"
    hidden.mkdir()
    with node_without(hidden, cluster, cpus=5):
        options = ("--slots", 5, "--cpu", "--experiments", hidden, "--ray", cluster.address)
        error = run("run", config, tmp_path / "project", *options, ends_with=2).stderr
    assert "cannot use files there: No such file or directory" in error
    assert "share" in error
    assert list(hidden.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "message"), [("127.0.0.1:9", "nothing answers there"), ("ray://127.0.0.1:10001", "expected HOST:PORT")]
)
def test_address_without_a_cluster_is_refused(address: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed; run tox -e ray")
    config = write_project(tmp_path / "project")
    arguments = ("run", config, tmp_path / "project", "--experiments", tmp_path / "experiments", "--ray", address)
    assert message in run(*arguments, ends_with=2).stderr
    assert not (tmp_path / "experiments").exists()


def test_own_cluster_ends_with_the_runner(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"DET_LIGHTNING_TEST={tmp_path}"
    monkeypatch.setenv(*mark.split("="))
    config = write_project(tmp_path / "project", hyperparameters={"waits_at": [2]})
    experiment = tmp_path / "small-1"
    process = start("run", config, tmp_path / "project", "--experiments", tmp_path, "--ray", "local")
    wait_for(lambda: len(events_of(experiment, "validation")) >= 2)
    kill(process)
    # Two of Ray's own processes try for 60 s to tell the head, which is dead, too.
    wait_for(lambda: processes_with(mark) == [], timeout_s=90)
    run("experiment", "resume", experiment, "--ray", "local")
    assert [steps for _, steps, _ in validations_in(experiment)] == [1, 2, 3, 4, 5]
    wait_for(lambda: processes_with(mark) == [])
