"""Names in a storage may come from anywhere: no command shows one so that it steers the terminal or fakes a line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from det_lightning import errors
from det_lightning.checkpoint import read_checkpoint
from det_lightning.cli.app import app
from det_lightning.escaping import escape
from det_lightning.pytorch import load_trial_from_checkpoint_path
from tests.checkpoint.made_checkpoints import LOAD_DATA, write_checkpoint
from tests.soak.mutations import made_up_archive

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
    signal.alarm(60)
    assert fine.name in output_of("ls", odd.parent)
    assert "0 kept by the rule" in output_of("prune", odd.parent, "--dry-run")
    output_of("verify", odd, ends_with=1)
    assert "it is not a file" in output_of("import", file, tmp_path / "target", ends_with=1)
    signal.alarm(0)
