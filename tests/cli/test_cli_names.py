"""Names and files of any kind: none steers the terminal or fakes a line, none keeps a command waiting."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from det_lightning import errors
from det_lightning.checkpoint import read_checkpoint
from det_lightning.cli.app import app
from det_lightning.config import read_config
from det_lightning.config.reading import read_given
from det_lightning.escaping import escape
from det_lightning.experiments.directory import find_experiments
from det_lightning.pytorch import load_trial_from_checkpoint_path
from det_lightning.testing.records.record import RecordError, read_record
from tests.checkpoint.made_checkpoints import LOAD_DATA, write_checkpoint
from tests.checkpoint.test_code_copy import make_socket
from tests.experiments import made_experiments
from tests.experiments.made_experiments import made_experiment
from tests.soak.mutations import made_up_archive

# A command that waited for the other end of a pipe would never end.
pytestmark = pytest.mark.timeout(60)

NAME = "[bold]two\nlines\x1b]0;gone\x07right\u202eleft\ttab\rreturn"


def output_of(*arguments: object, ends_with: int = 0) -> str:
    """Run a command; return what it wrote, of which each character is a printable one."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    assert [line for line in result.output.split("\n") if not line.isprintable()] == []
    return result.output


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A checkpoint with the name in its path, its metric, its files and a link beside it."""
    notes = {"metric": {"name": f"metric {NAME}", "value": 1.0}, "experiment": f"e {NAME}", "trial": f"t {NAME}"}
    storage = tmp_path / f"storage {NAME}"
    directory = write_checkpoint(storage, notes=notes).rename(storage / f"id {NAME}")
    (directory / f"extra {NAME}").write_text("x")
    (storage / f"link {NAME}").symlink_to(directory.name)
    return directory


def test_names_are_listed_escaped(odd: Path) -> None:
    table = output_of("ls", odd.parent)
    for shown in ("metric {}", "id {}", "link {} -> id {}"):
        assert shown.replace("{}", escape(NAME)) in table
    shown = output_of("show", odd)
    assert f"at {escape(odd)}" in shown
    assert f"extra {escape(NAME)}" in shown
    assert "1 kept by the rule" in output_of("prune", odd.parent, "--dry-run")


COMMANDS = {
    "verify {odd}": 1,
    "verify {storage}": 1,
    "show {odd}": 1,
    "show {storage}": 2,
    "show {storage}/none": 2,
    "ls {odd}": 2,
    "ls {odd}/none": 2,
    "export {odd} --to weights -o file": 1,
}


def test_errors_name_things_escaped(odd: Path) -> None:
    (odd / "metadata.json").unlink()
    for command, ends_with in COMMANDS.items():
        arguments = [part.format(odd=odd, storage=odd.parent) for part in command.split()]
        assert escape(NAME) in output_of(*arguments, ends_with=ends_with)


def test_names_in_checkpoints_are_escaped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A traceback is shown as it is, and so is what a program logs."""
    odd = NAME.replace("\n", "")
    unsafe, unknown = write_checkpoint(tmp_path), write_checkpoint(tmp_path)
    called = b"\x80\x02}X\x01\0\0\0acos" + odd.encode() + b"\nsystem\ns."
    (unsafe / "state_dict.pth").write_bytes(made_up_archive(called))
    (unknown / "load_data.json").write_text(json.dumps({**LOAD_DATA, "trial_cls_spec": f"os{NAME}:Trial"}))
    for checkpoint in (unsafe, unknown):
        (checkpoint / "metadata.json").write_text("{}")
    with pytest.raises(errors.UnsafeCheckpointError, match=r"state_dict\.pth refers to") as refused:
        read_checkpoint(unsafe)
    with pytest.raises(ValueError, match="cannot be imported") as failed:
        load_trial_from_checkpoint_path(unknown)
    messages = [str(refused.value), str(failed.value), *caplog.messages]
    assert [message for message in messages if not message.isprintable()] == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
@pytest.mark.parametrize("is_pipe", [True, False], ids=["a pipe", "a device"])
def test_no_command_waits_for_pipes(is_pipe: bool, tmp_path: Path) -> None:
    odd, fine = (write_checkpoint(tmp_path / "storage", steps) for steps in (5, 9))
    file = odd / "metadata.json"
    file.unlink()
    if is_pipe:
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    assert fine.name in output_of("ls", odd.parent)
    assert "0 kept by the rule" in output_of("prune", odd.parent, "--dry-run")
    output_of("verify", odd, ends_with=1)
    assert "it is not a file" in output_of("import", file, tmp_path / "target", ends_with=1)


# Pipes, sockets, devices and directories in place of files: an error at once, and nothing is replaced


LINEAR_TRIAL = Path(made_experiments.__file__).with_name("linear_trial.py")
COMMANDS_WITH_FILES = {
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


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "is a named pipe (FIFO)"),
    "socket": (make_socket, "is a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "directory": (Path.mkdir, "directory"),
}


@pytest.mark.parametrize(
    ("kind", "command"),
    [("pipe", command) for command in COMMANDS_WITH_FILES]
    + [(kind, command) for kind in ("socket", "device", "directory") for command in ("check", "annotate", "export")],
)
def test_special_file_is_left_alone(kind: str, command: str) -> None:
    make, named = KINDS[kind]
    arguments = COMMANDS_WITH_FILES[command]
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
