"""What people look at while an experiment runs."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning.experiments.state import Progress
from tests.experiments.running import write_project


@pytest.mark.parametrize(
    ("reports", "now_s", "left_s"),
    [
        ([], 0, None),
        ([(0.2, 10), (0.2, 20)], 20, None),
        ([(0.2, 10), (0.4, 20)], 20, 30),
        ([(0.2, 10), (0.4, 20)], 25, 25),
        ([(0.2, 10), (0.4, 20), (0.4, 24)], 25, 25),
        ([(0.5, 0), (1.0, 10)], 10, 0),
        ([(0.5, 0), (0.4, 10)], 10, None),
    ],
)
def test_time_left_follows_from_speed(reports: list[tuple[float, float]], now_s: float, left_s: float | None) -> None:
    progress = Progress()
    for fraction, at_s in reports:
        progress.report(fraction, at_s)
    assert progress.time_left_s(now_s) == pytest.approx(left_s)


@pytest.mark.slow
def test_terminal_shows_time_left(tmp_path: Path) -> None:
    """At a terminal, where the experiment is interrupted once it does."""
    config = write_project(
        tmp_path / "project", hyperparameters={"steps": 6, "waits_at": [3], "reports_progress": True}
    )
    terminal, end = pty.openpty()
    arguments = ["run", str(config), str(config.parent), "--experiments", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from det_lightning.cli import main; main()", *arguments],
        stderr=end,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )
    os.close(end)
    shown = ""
    asked = False
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        shown += piece.decode(errors="replace")
        if not asked and re.search(r"RUNNING +3 .* \d+:\d\d\s", shown):
            asked = True
            process.send_signal(signal.SIGINT)
    os.close(terminal)
    assert process.wait() == 130, shown
