"""Numbers of experiments and commands of Determined's program, which are answered with what to write here."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from det_lightning.cli.app import app
from tests.experiments.made_experiments import made_experiment


def run(*arguments: str, ends_with: int = 2) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == ends_with, result.output
    return result


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("experiment kill 1", "det experiment kill: det-lightning experiment stop EXPERIMENT, with its directory"),
        ("experiment pause 1", "det experiment pause: det-lightning experiment stop EXPERIMENT"),
        ("experiment activate 1", "det-lightning experiment resume EXPERIMENT"),
        ("experiment describe 1", "det-lightning experiment show EXPERIMENT"),
        ("experiment list", "det-lightning experiment ls."),
        ("experiment create c.yaml .", "det experiment create: det-lightning run CONFIG DIR."),
        ("e list", "det e list: det-lightning experiment ls."),
        ("trial logs 3", "det-lightning experiment logs EXPERIMENT TRIAL"),
        ("checkpoint rm 3", "det-lightning checkpoint prune STORAGE"),
    ],
)
def test_det_command_gets_counterpart(command: str, instead: str) -> None:
    assert instead in run(*command.split()).stderr


@pytest.mark.parametrize("command", ["nonsense", "experiment nonsense", "user login", "experiment move 1 2"])
def test_other_commands_are_just_unknown(command: str) -> None:
    error = run(*command.split()).stderr
    assert "No such command" in error
    assert "In place of" not in error


@pytest.mark.parametrize("command", ["show", "stop", "resume", "logs"])
@pytest.mark.parametrize("name", ["1", "a-serch-1", "experiments", "experiments/1"])
def test_near_experiments_are_named(name: str, command: str) -> None:
    directory = made_experiment(Path("experiments"))
    made_experiment(Path("experiments"))
    error = run("experiment", command, name, *(["1"] if command == "logs" else [])).stderr
    assert f"{name} is not an experiment" in error
    assert f"Name an experiment by its directory, such as {directory.path}" in error


def test_ls_is_named_without_experiments() -> None:
    assert "`det-lightning experiment ls --experiments DIR`" in run("experiment", "show", "1").stderr
    assert "There is no directory experiments" in run("experiment", "ls").stderr
    assert f"There is no directory {Path.home()}/no " in run("experiment", "ls", "--experiments=~/no").stderr
