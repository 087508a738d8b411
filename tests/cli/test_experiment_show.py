"""``det-lightning experiment show``: which trial is the best, where its checkpoint is, and what a terminal shows."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from det_lightning.cli.app import app
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.trial_table import format_number
from tests.experiments.made_experiments import change_config, made_experiment


def run(*arguments: object, ends_with: int = 0) -> Result:
    result = CliRunner().invoke(app, ["experiment", *map(str, arguments)])
    assert result.exit_code == ends_with, result.output
    return result


def show(directory: ExperimentDirectory, *arguments: object) -> list[str]:
    return [line.rstrip() for line in run("show", directory.path, *arguments).stdout.splitlines()]


def add_events(directory: ExperimentDirectory, *events: Mapping[str, Any]) -> None:
    with directory.events.open("a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)


def first_cells(lines: list[str]) -> list[str]:
    """Return the first column of the table of trials."""
    start = next(index for index, line in enumerate(lines) if line.startswith("─"))
    return [line[:4].strip() for line in lines[start + 1 :]]


def test_trials_are_shown(tmp_path: Path) -> None:
    directory = made_experiment(tmp_path)
    lines = show(directory)
    assert "best: 0.05, of trial 1 (*)" in lines
    assert first_cells(lines) == ["* 1", "2", "3"]
    assert "hyperparameters of all trials: constant=5, password=hidden" in lines
    (head,) = (line.split() for line in lines if "STATE" in line)
    assert head == ["ID", "STATE", "BATCHES", "BEST", "LATEST", "kind", "layers", "lr", "CHECKPOINT"]
    assert lines[-1].split() == ["3", "COMPLETED", "20", "0.15", "0.15", "b", "3", "0.001", "3-20"]
    assert not any(line.startswith("message") for line in lines)
    add_events(directory, {"type": "message", "text": "the disk is full"})
    assert "message: the disk is full" in show(directory)
    alone = show(made_experiment(tmp_path / "alone", trials=1))
    assert "hyperparameters: constant=5, kind=b, layers=1, lr=0.1, password=hidden" in alone


def test_hyperparameters_are_not_shown_as_python(tmp_path: Path) -> None:
    directory = made_experiment(tmp_path, trials=1)
    hparams = {"net": {"bias": True, "norm": None, "sizes": [1, 2]}, "constant": 5}
    add_events(directory, {"type": "trial_created", "time": 4.0, "trial": 2, "seed": 2, "hparams": hparams})
    lines = show(directory)
    assert "{" not in "".join(lines)
    assert lines[-1].split() == ["2", "PAUSED", "0", "true", "null", "[1,", "2]"]


ROUNDED = [(0.12345678, "0.1235"), (5.04863e-05, "5.049e-05"), (12345.678, "12346"), (-1234.5, "-1234")]
SPECIAL = [(0.0, "0"), (float("nan"), "nan"), (float("inf"), "inf"), (1e20, "1e+20"), (None, "")]


@pytest.mark.parametrize(("value", "text"), [*ROUNDED, *SPECIAL])
def test_number_has_four_digits(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(("smaller_is_better", "order"), [(True, [1, 2, 3, 4]), (False, [3, 2, 1, 4])])
def test_best_trial_is_first(smaller_is_better: bool, order: list[int], tmp_path: Path) -> None:
    searcher = {"metric": "loss", "smaller_is_better": smaller_is_better}
    directory = change_config(made_experiment(tmp_path), searcher=searcher)
    add_events(directory, {"type": "trial_created", "time": 4.0, "trial": 4, "seed": 4, "hparams": {}})
    assert first_cells(show(directory)) == [f"* {order[0]}", *map(str, order[1:])]
    trials = json.loads(run("show", directory.path, "--json").stdout)["trials"]
    assert [trial["id"] for trial in trials] == order


@pytest.mark.parametrize(
    ("storage", "root"),
    [
        ({}, "{}/checkpoints"),
        ({"type": "directory", "container_path": "kept"}, "{}/kept"),
        ({"type": "shared_fs", "host_path": "{}/shared", "storage_path": "x"}, "{}/shared/x"),
    ],
)
def test_best_prints_only_a_path_that_exists(storage: dict[str, str], root: str, tmp_path: Path) -> None:
    directory = made_experiment(tmp_path)
    section = {name: value.format(directory.path) for name, value in storage.items()}
    change_config(directory, checkpoint_storage=section)
    place = Path(root.format(directory.path))
    place.parent.mkdir(exist_ok=True)
    directory.checkpoints.rename(place)
    assert run("show", directory.path, "--best").output == f"{place}/1-20\n"
    shutil.rmtree(place / "1-20")
    error = run("show", directory.path, "--best", ends_with=2).stderr
    assert f"does not exist any more: {place}/1-20, written after 20 batches" in error
    assert [line.endswith(" 1-20 (missing)") for line in show(directory)[-3:]] == [True, False, False]


def test_unreachable_storage_is_not_empty(tmp_path: Path) -> None:
    section = {
        "type": "s3",
        "bucket": "none",
        "endpoint_url": "http://127.0.0.1:9",
        "access_key": "a",
        "secret_key": "b",
    }
    directory = change_config(made_experiment(tmp_path), checkpoint_storage=section)
    assert show(directory)[-3].endswith(" 1-20")
    error = run("show", directory.path, "--best", ends_with=2).stderr
    assert "cannot be looked for: s3://none/1-20" in error


def test_checkpoint_of_other_validation_is_marked(tmp_path: Path) -> None:
    directory = made_experiment(tmp_path)
    add_events(directory, {"type": "checkpoint_deleted", "time": 4.0, "trial": 1, "checkpoint_id": "1-20"})
    lines = show(directory)
    assert lines[-3].endswith("1-10 (batch 10; best: batch 20)")
    assert lines[-2].endswith(" 2-20")
    result = run("show", directory.path, "--best")
    assert result.stdout.endswith("/1-10\n")
    assert "written after 10 batches; the best validation was after 20" in result.stderr


def test_missing_best_checkpoint_is_explained(tmp_path: Path) -> None:
    directory = made_experiment(tmp_path, trials=1)
    deleted = {"type": "checkpoint_deleted", "time": 4.0, "trial": 1}
    add_events(directory, {**deleted, "checkpoint_id": "1-10"}, {**deleted, "checkpoint_id": "1-20"})
    assert "The best trial, 1, has no checkpoint." in run("show", directory.path, "--best", ends_with=2).stderr
    directory.events.write_text('{"type": "experiment_started", "time": 0.0}\n')
    error = run("show", directory.path, "--best", ends_with=2).stderr
    assert "has reported loss (smaller is better) yet" in error
    change_config(directory, checkpoint_storage="s3")
    assert "config.json is not the configuration" in run("show", directory.path, "--best", ends_with=2).stderr


def test_killed_experiment_is_paused_everywhere(tmp_path: Path) -> None:
    directory = made_experiment(tmp_path, trials=1)
    lines = directory.events.read_text().splitlines()[:-2]  # the trial had not ended
    directory.events.write_text("\n".join(lines) + "\n")
    add_events(directory, {"type": "trial_created", "time": 4.0, "trial": 2, "seed": 2, "hparams": {}})
    shown = json.loads(run("show", directory.path, "--json").stdout)
    assert [shown["state"], *(trial["state"] for trial in shown["trials"])] == ["PAUSED"] * 3
    assert "PAUSED" in run("ls", "--experiments", tmp_path).stdout
    assert "the state is PAUSED" in run("stop", directory.path).stderr


def test_best_trials_are_compared(tmp_path: Path) -> None:
    first, second = made_experiment(tmp_path), made_experiment(tmp_path, trials=1)
    second.events.write_text(second.events.read_text().replace('"loss":0.05', '"loss":0.02').replace("0.1,", "0.5,"))
    lines = run("compare", first.path, second.path).stdout.splitlines()
    assert "best: 0.02, of a-search-2 (*)" in lines
    assert "hyperparameters of all trials: constant=5, kind=b, layers=1, password=hidden" in lines
    head, _, *rows = (line.split() for line in lines[-4:])
    assert head == ["ID", "STATE", "BATCHES", "BEST", "LATEST", "TRIALS", "SEED", "lr"]
    assert rows == [
        ["a-search-1,", "trial", "1", "COMPLETED", "20", "0.05", "0.05", "3", "1", "0.1"],
        ["*", "a-search-2", "COMPLETED", "20", "0.02", "0.02", "1", "1", "0.5"],
    ]
    compared = json.loads(run("compare", first.path, second.path, "--json").stdout)
    assert [trial["hparams"]["lr"] for trial in compared["trials"]] == [0.1, 0.5]
    run("compare", first.path, second.path, "--html", tmp_path / "page.html")
    assert '"curves": {"loss": [[10.0, 20.0], [0.1, 0.05]]}' in (tmp_path / "page.html").read_text()


def test_compared_experiments_count_once(tmp_path: Path) -> None:
    path = made_experiment(tmp_path).path
    lines = run("compare", path, f"{path}/").stdout.splitlines()
    assert sum(line.startswith("* ") for line in lines) == 1
    assert f"{tmp_path / 'one'} is not an experiment" in run("compare", path, tmp_path / "one", ends_with=2).stderr


def test_page_replaces_pages_only(tmp_path: Path) -> None:
    Path("train.py").write_text("the code")
    said = run("show", made_experiment(tmp_path).path, "--html", "train.py", ends_with=2).stderr
    assert "must end with .html; got train.py" in said
    assert Path("train.py").read_text() == "the code"


@pytest.mark.parametrize(
    "arguments",
    ["show --json --html=p.html", "show --html=p.html --best", "show --json --best", "compare --json --html=p.html"],
)
def test_options_with_an_output_go_alone(arguments: str, tmp_path: Path) -> None:
    command, *options = arguments.split()
    error = run(command, made_experiment(tmp_path).path, *options, ends_with=2).stderr
    assert f"Use only one of {' and '.join(option.partition('=')[0] for option in options)}." in error
    assert not Path("p.html").exists()


def test_terminal_wraps_neither_numbers_nor_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as reader, os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        app(["experiment", "show", str(made_experiment(tmp_path).path)], standalone_mode=False)
        terminal.flush()
        lines = re.sub(r"\x1b\[[0-9;]*m", "", reader.read(65536).decode()).splitlines()
    assert all(len(line) <= 64 for line in lines[-10:])
    assert any(line.startswith("* 1  COMP") and "  20  0.05    0.05" in line for line in lines)
