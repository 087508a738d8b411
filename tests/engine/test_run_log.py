"""What a run logs at level INFO, and where its progress bar goes."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest

from det_lightning import pytorch
from det_lightning.checkpoint import CheckpointStorage
from tests.launching import environment
from tests.trials import SmallTrial, fit_trial
from tests.warm_python import WarmPython


def fit(storage: Path, trial_class: type[SmallTrial] = SmallTrial, **arguments: Any) -> Any:
    periods = {"reporting_period": pytorch.Batch(2), "validation_period": pytorch.Batch(4)}
    return fit_trial(trial_class, checkpoint_storage=storage, **periods, **arguments)


def test_facts_of_a_run_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="det_lightning")
    trial = fit(tmp_path)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    number = r"[0-9.e+-]+"
    speed = rf"; (\d+) batches \({number} batches/s\) in {number} s\."
    expected = [
        rf"Checkpoints go to {tmp_path}\.",
        rf"Training SmallTrial on {trial.context.device}, 1 process, from batch 0\.",
        rf"Training after 2 batches: loss={number}, batch=0\.5{speed}",
        rf"Training after 4 batches: loss={number}, batch=2\.5{speed}",
        rf"Validation after 4 batches: validation_loss={number}{speed}",
        rf"Checkpoint {checkpoint} after 4 batches\.",
    ]
    assert len(caplog.messages) == len(expected)
    found = [re.fullmatch(pattern, message) for pattern, message in zip(expected, caplog.messages, strict=True)]
    assert None not in found, caplog.messages
    assert [match.groups() for match in found if match and match.groups()] == [("2",), ("2",), ("4",)]
    caplog.clear()
    fit(tmp_path, max_length=pytorch.Batch(6), latest_checkpoint="last")
    assert f"1 process, from batch 4, resumed from checkpoint {checkpoint}." in caplog.text


SCRIPT = """
from det_lightning import pytorch
from tests.trials import SmallTrial

with pytorch.init(enable_tensorboard_logging=False) as context:
    pytorch.Trainer(SmallTrial(context), context).fit(
        max_length=pytorch.Batch(4), checkpoint_policy="none", checkpoint_storage="storage"
    )
print("printed by the script")
"""


@pytest.mark.slow
def test_the_progress_bar_goes_to_a_terminal(warm_python: WarmPython) -> None:
    command = [warm_python.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout == "printed by the script\n"
    assert "Epoch" not in done.stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # of no width it would show nothing
    streams: Any = {"stdout": subprocess.PIPE, "stderr": theirs, "text": True}
    with subprocess.Popen(command, env=environment(), **streams) as process:
        os.close(theirs)
        assert process.stdout is not None
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the script has closed the terminal
                break
        assert process.stdout.read() == "printed by the script\n"
    os.close(ours)
    assert b"Epoch 0" in shown
