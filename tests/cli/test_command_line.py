"""The command line itself: its help, the completion of words, and what it says to an unknown command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from det_lightning.cli.app import app
from tests.experiments.made_experiments import made_experiment
from tests.experiments.running import write_project

ROOT = Path(__file__).parents[2]


def commands_below(group: Any, name: str = "") -> Iterator[str]:
    yield name
    for member, command in getattr(group, "commands", {}).items():
        yield from commands_below(command, f"{name} {member}".strip())


COMMANDS = list(commands_below(typer.main.get_command(app)))


def run(*arguments: str, ends_with: int = 0, **environment: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", **environment}, prog_name="det-lightning")
    assert result.exit_code == ends_with, result.output
    return result.output


LENGTH = {"max_time": 9, "time_metric": "batches"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_example_and_page(command: str) -> None:
    text = run(*command.split(), "--help")
    assert "bool" not in text.lower()
    assert f"Example: det-lightning {command}".rstrip() in text
    page = re.search(r"Documentation: (\S+)", text)
    assert page is not None
    assert (ROOT / page[1]).is_file()
    in_one_line = " ".join(text.split())
    assert ("Exit codes: 0 success; 1 a checkpoint is damaged" in in_one_line) == command.startswith("checkpoint")
    usage = text.partition("Usage:")[2].splitlines()[0]
    assert not set("{}<>") & set(usage) and "[[" not in usage


def test_wide_help_offers_completion() -> None:
    line = "Checkpoints without both are left alone, and so are the trials of"
    assert line in run("checkpoint", "prune", "--help")
    assert "--install-completion" in run("--help")


@pytest.mark.parametrize(
    ("typed", "offered"), [("exp", "experiment"), ("checkpoint ver", "verify"), ("checkpoint export --to w", "weights")]
)
def test_words_are_completed(typed: str, offered: str) -> None:
    words = f"det-lightning {typed}"
    position = str(words.count(" "))
    shown = run(_DET_LIGHTNING_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=position)
    assert shown.split() == [offered]


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("runn", "'run'"),
        ("experiment shwo", "'show'"),
        ("resume", "'experiment resume'"),
        ("verfy", "'checkpoint verify'"),
        ("show", "'experiment show' or 'checkpoint show'"),
    ],
)
def test_unknown_command_gets_suggestions(command: str, meant: str) -> None:
    assert f"Did you mean {meant}?" in run(*command.split(), ends_with=2, COLUMNS="300")


@pytest.mark.parametrize(
    ("searcher", "listed"),
    [
        ({"name": "single"}, 1),
        ({"name": "grid"}, 3),
        ({"name": "random", "max_trials": 5, "max_concurrent_trials": 2}, 5),
        ({"name": "async_halving", "num_rungs": 2, "max_trials": 9, "max_concurrent_trials": 2, **LENGTH}, 2),
    ],
)
def test_dry_run_lists_first_trials(searcher: dict[str, Any], listed: int, tmp_path: Path) -> None:
    hparams = {"lr": {"type": "double", "minval": 0.1, "maxval": 1, "count": 3}}
    config = write_project(tmp_path, hyperparameters=hparams, searcher={"metric": "loss", **searcher})
    assert len(json.loads(run("run", str(config), "--dry-run"))["trials"]) == listed


# Numbers of experiments and commands of Determined's program, which are answered with what to write here


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("experiment kill 1", "det experiment kill: det-lightning experiment stop EXPERIMENT, with its directory"),
        ("experiment activate 1", "det-lightning experiment resume EXPERIMENT"),
        ("experiment list", "det-lightning experiment ls."),
        ("experiment create c.yaml .", "det experiment create: det-lightning run CONFIG DIR."),
        ("trial logs 3", "det-lightning experiment logs EXPERIMENT TRIAL"),
        ("checkpoint rm 3", "det-lightning checkpoint prune STORAGE"),
    ],
)
def test_det_command_gets_counterpart(command: str, instead: str) -> None:
    assert instead in run(*command.split(), ends_with=2, COLUMNS="300")


@pytest.mark.parametrize("command", ["nonsense", "experiment nonsense", "user login", "experiment move 1 2"])
def test_other_commands_are_just_unknown(command: str) -> None:
    error = run(*command.split(), ends_with=2, COLUMNS="300")
    assert "No such command" in error
    assert "In place of" not in error


@pytest.mark.parametrize("command", ["show", "stop", "resume", "logs"])
@pytest.mark.parametrize("name", ["1", "a-serch-1", "experiments", "experiments/1"])
def test_near_experiments_are_named(name: str, command: str) -> None:
    directory = made_experiment(Path("experiments"))
    made_experiment(Path("experiments"))
    error = run("experiment", command, name, *(["1"] if command == "logs" else []), ends_with=2, COLUMNS="300")
    assert f"{name} is not an experiment" in error
    assert f"Name an experiment by its directory, such as {directory.path}" in error


def test_ls_is_named_without_experiments() -> None:
    assert "`det-lightning experiment ls --experiments DIR`" in run(
        "experiment", "show", "1", ends_with=2, COLUMNS="300"
    )
    assert "There is no directory experiments" in run("experiment", "ls", ends_with=2, COLUMNS="300")
    assert f"There is no directory {Path.home()}/no " in run(
        "experiment", "ls", "--experiments=~/no", ends_with=2, COLUMNS="300"
    )
