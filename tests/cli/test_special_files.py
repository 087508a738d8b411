"""Pipes, sockets, devices and directories in place of files: an error at once, and nothing is replaced."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from det_lightning import errors
from det_lightning.cli.app import app
from det_lightning.config import read_config
from det_lightning.config.reading import read_given
from det_lightning.experiments.directory import find_experiments
from det_lightning.testing.records.record import RecordError, read_record
from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.experiments import made_experiments
from tests.experiments.made_experiments import made_experiment

# A command that waited for the other end of a pipe would never end.
pytestmark = pytest.mark.timeout(60)

LINEAR_TRIAL = Path(made_experiments.__file__).with_name("linear_trial.py")
COMMANDS = {
    "check": ["experiment", "check", "{}.yaml"],
    "run": ["run", "{}.yaml"],
    "import": ["checkpoint", "import", "{}.ckpt", "storage"],
    "annotate": ["checkpoint", "annotate", "storage", "{}.json"],
    "export": ["checkpoint", "export", "{checkpoint}", "--to", "weights", "-o", "{}.pt", "--force"],
    "show --html": ["experiment", "show", "{experiment}", "--html", "{}.html"],
    "port": ["port", "{}.py"],
    "port --report": ["port", "project", "--report", "{}.html"],
    "port --output": ["port", "--to", "lightning", "project/file.py", "-o", "{}.py", "--force"],
}


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # a path of a socket is short


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "is a named pipe (FIFO)"),
    "socket": (make_socket, "is a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "directory": (Path.mkdir, "directory"),
}


@pytest.mark.parametrize(
    ("kind", "command"),
    [("pipe", command) for command in COMMANDS]
    + [(kind, command) for kind in ("socket", "device", "directory") for command in ("check", "annotate", "export")],
)
def test_special_file_is_left_alone(kind: str, command: str) -> None:
    make, named = KINDS[kind]
    arguments = COMMANDS[command]
    (template,) = [part for part in arguments if part.startswith("{}")]
    special = Path(template.format("special"))
    make(special)
    before = special.stat()
    Path("project").mkdir()
    shutil.copy(LINEAR_TRIAL, "project/file.py")
    places = {"checkpoint": write_checkpoint("storage"), "experiment": made_experiment(Path("experiments")).path}
    result = CliRunner().invoke(app, [part.format("special", **places) for part in arguments])
    assert result.exit_code in (1, 2), result.output
    assert str(special) in result.stderr
    assert named in result.stderr or "is not a file" in result.stderr
    assert (special.stat().st_ino, stat.S_IFMT(special.stat().st_mode)) == (before.st_ino, stat.S_IFMT(before.st_mode))


def test_pipe_is_refused_in_calls() -> None:
    os.mkfifo("config.yaml")
    for read in (read_config, read_given):
        with pytest.raises(errors.ConfigError, match=r"config\.yaml is a named pipe"):
            read("config.yaml")
    with pytest.raises(RecordError, match=r"config\.yaml is a named pipe"):
        read_record("config.yaml")


def test_pipe_of_a_shell_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"name: piped\nentrypoint: a.py\nsearcher: {name: single, metric: loss}\n")
    os.close(writing)
    assert read_config(f"/dev/fd/{reading}").name == "piped"
    os.close(reading)


@pytest.mark.parametrize("name", ["events.jsonl", "config.json", "options.json"])
def test_pipe_in_an_experiment_blocks_nothing(name: str) -> None:
    directory = made_experiment(Path("experiments"))
    (directory.path / name).unlink(missing_ok=True)
    os.mkfifo(directory.path / name)
    for command in ("show", "resume"):
        result = CliRunner().invoke(app, ["experiment", command, str(directory.path)])
        assert result.exit_code == 2, result.output
    if name == "events.jsonl":
        assert find_experiments(Path("experiments")) == []
