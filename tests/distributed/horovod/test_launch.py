"""The command line of the launcher; horovodrun itself is not started."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping

import pytest

from det_lightning.launch import horovod

Started = list[tuple[list[str], Mapping[str, str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What would have been started, as if Horovod were installed."""
    found: Started = []

    def run(command: list[str], environment: dict[str, str]) -> int:
        found.append((command, environment))
        return 0

    monkeypatch.setattr(horovod, "_execute", run)
    monkeypatch.setattr(horovod, "count_slots", lambda: 1)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "horovod" or find_spec(name))
    return found


def run(started: Started, *arguments: str) -> tuple[list[str], Mapping[str, str]]:
    assert horovod.main(arguments) == 0
    return started[-1]


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ([], ["-np", "1"]),
        (["--nproc-per-node", "3"], ["-np", "3"]),
        (["--nproc_per_node=3", "--verbose"], ["-np", "3", "--verbose"]),
        (["-np", "4", "--cycle-time-ms", "2"], ["-np", "4", "--cycle-time-ms", "2"]),
        (["--nproc-per-node", "2", "-H", "a:2,b:2"], ["-np", "4", "-H", "a:2,b:2"]),
    ],
)
def test_options_are_those_of_horovodrun(started: Started, options: list[str], passed: list[str]) -> None:
    command, environment = run(started, *options, "--", "python", "-c", "pass")
    assert command == [sys.executable, "-m", "horovod.runner.launch", *passed, sys.executable, "-c", "pass"]
    assert environment["USE_HOROVOD"] == "1"


def test_autohorovod_with_one_process_uses_no_horovod(started: Started) -> None:
    command, environment = run(started, "--autohorovod", "python", "-c", "pass")
    assert command == [sys.executable, "-c", "pass"]
    assert "USE_HOROVOD" not in environment


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-np", "2", "python", "train.py"], "put -- between"),
        (["-np", "none", "--", "python"], "must be a positive integer; got 'none'"),
        (["-np", "--", "python"], "-np/--num-proc: expected one argument"),
        (["-np", "2", "--nproc-per-node", "2", "--", "python"], "not allowed with argument"),
    ],
)
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert horovod.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert horovod.main(["--help"]) == 0
    assert "--nproc-per-node" in capsys.readouterr().out


def test_a_missing_horovod_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert horovod.main(["-np", "2", "--", "python"]) == 1
    assert "pip install -e '.[horovod]'" in capsys.readouterr().err
