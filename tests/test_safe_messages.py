"""The doors to a terminal: errors, records of logs and commands show no raw name from an untrusted source."""

from __future__ import annotations

import inspect
import logging
import pickle
from pathlib import Path

import pytest
from typer.testing import CliRunner

import det_lightning
from det_lightning import errors
from det_lightning.cli.app import app
from det_lightning.escaping import get_logger, make_safe
from det_lightning.masking import MASK

#: Each name, and as it is shown.
HOSTILE = {
    "a\x1b[31mb": r"a\x1b[31mb",
    "a\u202eb": r"a\u202eb",
    "a\udc80b": r"a\udc80b",
    "a\nb": r"a\nb",
    "a\rb": r"a\rb",
}
URL = {"ftp://me:hunter2-4711@host/a": f"ftp://me:{MASK}@host/a"}
#: How an error of each type is made of a message; of all others: with the message alone.
SPECIAL = {
    errors.ConfigError: lambda text: errors.ConfigError(text, [errors.ConfigMistake(1, text, text)] * 2),
    errors.InvalidDataTypeException: lambda text: errors.InvalidDataTypeException(int, text),
    errors.InvalidConfigurationException: lambda text: errors.InvalidConfigurationException({}, text),
}
FIXED = {errors.ShouldExit, errors.Preempted}
ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, BaseException)]


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind not in FIXED], ids=lambda kind: kind.__name__)
def test_errors_show_names_safely(kind: type[BaseException]) -> None:
    for name, shown in {**HOSTILE, **URL}.items():
        error = SPECIAL.get(kind, kind)(f"There is no {name}.")
        for same in (error, pickle.loads(pickle.dumps(error))) if kind not in SPECIAL else (error,):
            assert f"There is no {shown}." in str(same)
            assert [line for line in str(same).split("\n  ") if not line.isprintable()] == []


@pytest.mark.parametrize(("name", "shown"), {**HOSTILE, **URL}.items(), ids=ascii)
def test_logs_show_names_safely(name: str, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    get_logger("det_lightning.of.a.test").warning("There is no %s, %d times.", name, 2)
    logging.getLogger("of.the.user").warning("one line\nand another")
    assert caplog.messages == [f"There is no {shown}, 2 times.", "one line\nand another"]


def test_every_logger_is_safe() -> None:
    directory = Path(det_lightning.__file__).parent
    files = [file for place in (".", "adapters", "callbacks") for file in (directory / place).rglob("*.py")]
    assert len(files) > 300
    assert [file for file in files if "logging.getLogger(__name__)" in file.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
@pytest.mark.parametrize(
    "command",
    ["checkpoint ls", "checkpoint show", "experiment show", "experiment check", "port", "--unknown", "run x --unknown"],
)
def test_commands_show_names_safely(command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, *words = [*command.split(), name]
    result = CliRunner().invoke(app, [first, *words] if first[0] != "-" else [f"{first}-{name}"])
    assert result.exit_code == 2
    assert [line for line in result.output.split("\n") if not line.isprintable()] == []
    assert "a\nb" not in result.output


def test_lines_of_a_list_stay() -> None:
    """Lines with an indent cannot be taken for another message."""
    assert make_safe("2 mistakes:\n  a\x07\n  b\nc") == "2 mistakes:\n  a\\x07\n  b\\nc"
