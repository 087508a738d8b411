"""Each example runs as its user runs it: in a process of its own, from somewhere else."""

from __future__ import annotations

import csv
import json
import pathlib
import re
from collections.abc import Callable
from typing import TypeAlias

import pytest

from tests.experiments.running import events_of
from tests.experiments.running import run as run_command
from tests.warm_python import WarmPython

pytestmark = pytest.mark.slow

Run: TypeAlias = Callable[..., str]

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def run_example(warm_python: WarmPython, tmp_path: pathlib.Path) -> Run:
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


def test_digits_reads_97_percent_and_writes_picture_metrics_and_checkpoint(
    run_example: Run, tmp_path: pathlib.Path
) -> None:
    printed = run_example("digits/train.py", "--output", "out")

    assert percentage_after("Best validation", printed) >= 0.97
    assert percentage_after("Loaded again", printed) == percentage_after("Best validation", printed)
    assert (tmp_path / "out" / "run-1" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("out/run-1/runs/events.out.tfevents.*"))
    assert list(tmp_path.glob("out/run-1/checkpoints/*/metadata.json"))
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_digits_checkpoint_holds_the_code_of_the_example_only(run_example: Run, tmp_path: pathlib.Path) -> None:
    run_example("digits/train.py", "--output", "out", "--epochs", "1")

    (code,) = tmp_path.glob("out/run-1/checkpoints/*/code")
    assert sorted(path.name for path in code.rglob("*")) == [
        "README.md",
        "history.py",
        "model_def.py",
        "train.py",
        "train_lightning.py",
    ]


def test_a_second_run_of_digits_is_apart_from_the_first(run_example: Run, tmp_path: pathlib.Path) -> None:
    run_example("digits/train.py", "--output", "out", "--epochs", "1")
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run_example("digits/train.py", "--output", "out", "--epochs", "1")
    run_example("digits/train_lightning.py", "--output", "out", "--epochs", "1")

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run-1", "run-2", "run-3"]
    assert {path: path.read_bytes() for path in (tmp_path / "out" / "run-1").rglob("*") if path.is_file()} == first
    assert len([*tmp_path.glob("out/run-2/runs/events.out.tfevents.*")]) == 1


def test_digits_under_either_trainer_gives_the_same_numbers(run_example: Run, tmp_path: pathlib.Path) -> None:
    first = run_example("digits/train.py", "--output", "first", "--epochs", "2")
    second = run_example("digits/train_lightning.py", "--output", "second", "--epochs", "2")

    def best(printed: str) -> str:
        return next(line for line in printed.splitlines() if line.startswith("Best validation"))

    assert best(first) == best(second)
    assert (tmp_path / "second" / "run-1" / "curves.png").exists()
    with (tmp_path / "second" / "run-1" / "csv" / "version_0" / "metrics.csv").open() as file:
        logged = [row["validation_accuracy"] for row in csv.DictReader(file) if row["validation_accuracy"]]
    assert len(logged) == 2


def test_gan_comes_close_to_the_real_points_and_draws_them(run_example: Run, tmp_path: pathlib.Path) -> None:
    printed = run_example("gan/train.py", "--batches", "500", "--picture", "points.png")

    labels = ("before training", "after training", "at best")
    before, after, at_best = (float(re.search(rf"{label} +([\d.]+)", printed).group(1)) for label in labels)
    assert before > 1
    assert at_best < after < before / 10
    assert (tmp_path / "points.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("stop_after", ["45", "77", "90"], ids=["end of an epoch", "inside an aggregation", "update"])
def test_resumed_run_ends_bit_equal(run_example: Run, stop_after: str) -> None:
    printed = run_example("resume/train.py", "--length", "100", "--stop-after", stop_after)

    assert "Bit-equal" in printed


def test_the_search_stops_a_worse_trial_and_finds_one_that_reads_digits(tmp_path: pathlib.Path) -> None:
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
