"""The wrapper for the processes of a script that is its own launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning.launch.wrap_rank import main
from tests.launching import environment

WRAPPER = [sys.executable, "-m", "det_lightning.launch.wrap_rank"]
# Prints until it is asked to end.
WAITS = """\
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
signal.pause()
"""


def wrap(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WRAPPER, *arguments], capture_output=True, text=True, timeout=60, env=environment(**variables), check=False
    )


def test_each_line_begins_with_the_rank() -> None:
    script = r"import sys; print('one\ntwo'); sys.stderr.write('10%\r20%\r'); print('three', end='')"
    ended = wrap("3", "--", sys.executable, "-c", script)
    assert ended.stdout == "[rank=3] one\n[rank=3] two\n[rank=3] three\n"
    assert ended.stderr == "[rank=3] 10%\n[rank=3] 20%\n"
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("rank", "shown"), [("OMPI_RANK,RANK", "[rank=4] "), ("RANK", "[rank=4] "), ("0", "[rank=0] ")]
)
def test_rank_is_a_number_or_a_variable(rank: str, shown: str) -> None:
    ended = wrap("--no-redirect-stdio", rank, sys.executable, "-c", "print('here')", RANK="4")
    assert ended.stdout == f"{shown}here\n"


@pytest.mark.parametrize(
    ("does", "status"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)]
)
def test_the_status_is_that_of_the_command(does: str, status: int) -> None:
    assert wrap("0", sys.executable, "-c", f"import os, signal, sys; {does}").returncode == status


def test_a_signal_reaches_the_command(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    process = subprocess.Popen([*WRAPPER, "0", sys.executable, str(script)], stdout=subprocess.PIPE, env=environment())
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[rank=0] ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["NO_SUCH_VARIABLE", "true"], "'NO_SUCH_VARIABLE'"), (["1"], "the command to run is missing")],
)
def test_bad_input_is_named_and_ends_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err
