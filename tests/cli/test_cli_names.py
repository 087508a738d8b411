"""Names in a storage may come from anywhere: no command shows one so that it steers the terminal or fakes a line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from det_lightning.cli.app import app
from det_lightning.escaping import escape
from tests.checkpoint.made_checkpoints import write_checkpoint

NAMES = ["two\nlines", "\x1b]0;gone\x07", "right\u202eleft", "tab\tand\rreturn"]


def output_of(*arguments: object, ends_with: int = 0) -> str:
    """Run a command; return what it wrote, of which each character is a printable one."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    assert [line for line in result.output.split("\n") if not line.isprintable()] == []
    return result.output


@pytest.fixture(params=NAMES, ids=ascii)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def odd(tmp_path: Path, name: str) -> Path:
    """A checkpoint with the name in its path, its metric, its files and a link beside it."""
    notes = {"metric": {"name": f"metric {name}", "value": 1.0}, "experiment": f"e {name}", "trial": f"t {name}"}
    storage = tmp_path / f"storage {name}"
    directory = write_checkpoint(storage, notes=notes).rename(storage / f"id {name}")
    (directory / f"extra {name}").write_text("x")
    (storage / f"link {name}").symlink_to(directory.name)
    return directory


def test_names_are_listed_escaped(odd: Path, name: str) -> None:
    table = output_of("ls", odd.parent)
    for shown in ("metric {}", "id {}", "link {} -> id {}"):
        assert shown.replace("{}", escape(name)) in table
    shown = output_of("show", odd)
    assert f"at {escape(odd)}" in shown
    assert f"extra {escape(name)}" in shown
    assert "0 kept by the rule" in output_of("prune", odd.parent, "--dry-run")


@pytest.mark.parametrize(
    ("command", "ends_with"),
    [
        (["verify", "{odd}"], 1),
        (["verify", "{storage}"], 1),
        (["show", "{odd}"], 1),
        (["show", "{storage}"], 2),
        (["show", "{storage}/none"], 2),
        (["ls", "{odd}"], 2),
        (["ls", "{odd}/none"], 2),
        (["export", "{odd}", "--to", "weights", "-o", "file"], 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_things_escaped(odd: Path, name: str, command: list[str], ends_with: int) -> None:
    (odd / "metadata.json").unlink()
    reported = output_of(*(part.format(odd=odd, storage=odd.parent) for part in command), ends_with=ends_with)
    assert escape(name) in reported
