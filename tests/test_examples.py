"""Each example runs as its user runs it: in a process of its own, from somewhere else."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.experiments.running import events_of
from tests.experiments.running import run as run_command
from tests.warm_python import WarmPython

pytestmark = pytest.mark.slow

Run: TypeAlias = Callable[..., str]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def run_example(warm_python: WarmPython, tmp_path: Path) -> Run:
    """Return a function that runs a script of the examples and returns what it printed."""

    def run(script: str, *arguments: str) -> str:
        done = warm_python.run(EXAMPLES / script, *arguments, cwd=tmp_path)
        assert done.returncode == 0, f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    return run


def percentage_after(label: str, printed: str) -> float:
    found = re.search(rf"^{label}.*accuracy ([\d.]+)%", printed, flags=re.MULTILINE)
    assert found, printed
    return float(found.group(1)) / 100


def best(printed: str) -> str:
    return next(line for line in printed.splitlines() if line.startswith("Best validation"))


def test_digits_learns_and_both_trainers_agree(run_example: Run, tmp_path: Path) -> None:
    """It reads 97 percent, and each run has a directory of its own; both Trainers give the same numbers."""
    printed = run_example("digits/train.py", "--output", "out")
    assert percentage_after("Best validation", printed) >= 0.97
    assert percentage_after("Loaded again", printed) == percentage_after("Best validation", printed)
    run = tmp_path / "out" / "run-1"
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    code, *_ = run.glob("checkpoints/*/code")
    own = ["README.md", "history.py", "model_def.py", "train.py", "train_lightning.py"]
    assert sorted(path.name for path in code.rglob("*")) == own
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    by_determined = run_example("digits/train.py", "--output", "out", "--epochs", "2")
    by_lightning = run_example("digits/train_lightning.py", "--output", "out", "--epochs", "2")
    assert best(by_determined) == best(by_lightning)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run-1", "run-2", "run-3"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    assert len([*tmp_path.glob("out/run-2/runs/events.out.tfevents.*")]) == 1
    assert (tmp_path / "out" / "run-3" / "curves.png").exists()
    with (tmp_path / "out" / "run-3" / "csv" / "version_0" / "metrics.csv").open() as file:
        assert len([row for row in csv.DictReader(file) if row["validation_accuracy"]]) == 2


def test_gan_comes_close_to_the_points(run_example: Run, tmp_path: Path) -> None:
    printed = run_example("gan/train.py", "--batches", "500", "--picture", "points.png")
    labels = ("before training", "after training", "at best")
    before, after, at_best = (float(re.search(rf"{label} +([\d.]+)", printed).group(1)) for label in labels)
    assert before > 1
    assert at_best < after < before / 10
    assert (tmp_path / "points.png").read_bytes().startswith(b"\x89PNG")


def test_resumed_run_ends_bit_equal(run_example: Run) -> None:
    """It stops inside of an aggregation."""
    assert "Bit-equal" in run_example("resume/train.py", "--length", "100", "--stop-after", "77")


def test_search_stops_a_worse_trial(tmp_path: Path) -> None:
    # One trial after the other, so that the third one is always compared with both others.
    small = ("searcher.max_trials=3", "searcher.max_time=4", "searcher.divisor=2", "searcher.bracket_rungs=[3]")
    overrides = [part for value in (*small, "resources.max_slots=1") for part in ("--config", value)]
    arguments = [EXAMPLES / "search" / "adaptive.yaml", EXAMPLES / "digits", "--experiments", tmp_path, *overrides]
    run_command("run", *arguments, timeout_s=500, is_warm=True)
    experiment = tmp_path / "digits-search-1"
    validations = events_of(experiment, "validation")
    assert {event["trial"]: event["metrics"]["epochs"] for event in validations} == {1: 4, 2: 4, 3: 1}
    assert max(event["metrics"]["validation_accuracy"] for event in validations) >= 0.9
    shown = json.loads(run_command("experiment", "show", experiment, "--json").stdout)
    assert (shown["state"], len(shown["trials"])) == ("COMPLETED", 3)
