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
        ("checkpoint resume", "'experiment resume'"),
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
