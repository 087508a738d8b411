"""Scripts with ``DetCallback`` as trials of ``det-lightning run``."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.running import events_of, run, start, wait_for, write_project
from tests.launching import ROOT

PAGE = ROOT / "docs" / "transformers.md"
SCRIPT = Path(__file__).with_name("tiny_training.py")
ARGUMENTS = {
    "max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, "logging_steps": 2, "save_steps": 4,
    "per_device_train_batch_size": 4, "learning_rate": 0.01,
}  # fmt: skip
SINGLE = {"name": "single", "metric": "eval_loss"}

pytestmark = pytest.mark.slow
pytest.importorskip("transformers", reason="transformers is not installed; run tox -e transformers")


def project_with(folder: Path, hparams: dict[str, Any], **sections: Any) -> Path:
    given = {"entrypoint": f"exec python3 {SCRIPT.name}", "searcher": SINGLE, **sections}
    config = write_project(folder, hyperparameters=hparams, **given)
    shutil.copy(SCRIPT, folder)
    return config


def validations_in(experiment: Path) -> list[tuple[int, float]]:
    return [(event["steps_completed"], event["metrics"]["eval_loss"]) for event in events_of(experiment, "validation")]


def test_preempted_training_ends_equal(tmp_path: Path) -> None:
    config = project_with(tmp_path / "project", {"training_arguments": ARGUMENTS})
    run("run", config, tmp_path / "project", "--experiments", tmp_path / "whole", "--cpu")
    whole = tmp_path / "whole" / "small-1"
    assert [event["steps_completed"] for event in events_of(whole, "checkpoint")] == [4, 8]
    config = project_with(tmp_path / "project", {"training_arguments": ARGUMENTS, "waits_at": 5})
    process = start("run", config, tmp_path / "project", "--experiments", tmp_path, "--cpu")
    experiment = tmp_path / "small-1"
    wait_for(lambda: len(events_of(experiment, "checkpoint")) == 1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert [event["steps_completed"] for event in events_of(experiment, "checkpoint")] == [4, 5]
    run("experiment", "resume", experiment, timeout_s=240)
    assert [event["steps_completed"] for event in events_of(experiment, "checkpoint")] == [4, 5, 8]
    assert validations_in(experiment) == validations_in(whole)
    assert [step for step, _ in validations_in(whole)] == [4, 8]
    assert [event["closed"] for event in events_of(experiment, "run_ended")] == [None, "COMPLETED"]


def test_search_of_the_page_runs(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for language, name in (("python", "train.py"), ("yaml", "search.yaml")):
        example = re.search(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        assert example is not None
        (project / name).write_text(example[1])
    two = ("--config", "searcher.max_trials=2", "--config", "searcher.max_concurrent_trials=1")
    run("run", project / "search.yaml", project, "--experiments", tmp_path, "--cpu", *two, timeout_s=240)
    experiment = tmp_path / "first-token-1"
    hparams_of = {event["trial"]: event["hparams"] for event in events_of(experiment, "trial_created")}
    assert sorted(hparams_of) == [1, 2]
    assert hparams_of[1] != hparams_of[2]
    assert [event["closed"] for event in events_of(experiment, "run_ended")] == ["COMPLETED", "COMPLETED"]
    assert {step for step, _ in validations_in(experiment)} == {10, 20}


def test_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    entrypoint = f"python3 -m determined.launch.torch_distributed -- python3 {SCRIPT.name}"
    config = project_with(
        tmp_path / "project",
        {"training_arguments": {**ARGUMENTS, "max_steps": 2}},
        entrypoint=entrypoint,
        resources={"slots_per_trial": 2},
    )
    run("run", config, tmp_path / "project", "--experiments", tmp_path, "--cpu", timeout_s=240)
    experiment = tmp_path / "small-1"
    assert [step for step, _ in validations_in(experiment)] == [2]
    (checkpoint,) = (experiment / "checkpoints").glob("*/checkpoint-2")
    files = {path.name for path in checkpoint.iterdir()}
    assert {"model.safetensors", "my_data.json", "rng_state_0.pth", "rng_state_1.pth"} <= files
