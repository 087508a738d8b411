"""Making records of a training on either side.

The same recorder watches the real determined (in a process of its own, or long ago in an old environment) and
det_lightning (in this process), so that both records have the same form. Compare them with
:func:`det_lightning.testing.records.comparison.first_difference`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from det_lightning.testing.records.record import (
    RecordError,
    RunSettings,
    TrainingRecord,
    parse_record,
    read_record,
    write_record,
)

__all__ = [
    "RecordError",
    "RunSettings",
    "TrainingRecord",
    "read_record",
    "record_determined",
    "record_ours",
    "write_record",
]

_RECORDER = Path(__file__).parents[1] / "recorder.py"


def record_ours(
    trial: type, settings: RunSettings, *, spec: str | None = None, threads: int | None = None
) -> TrainingRecord:
    """Train ``trial`` on det_lightning in this process, and return what was seen.

    An error of the trial ends up in the record. The random generators and torch's number of threads are put back.

    Args:
        trial: a ``PyTorchTrial`` class.
        settings: what to run, such as ``read_record(path).settings``.
        spec: the name to record, by default ``"module:Class"`` of the class.
        threads: torch's number of threads, by default as it is; numbers may depend on it, so give the reference's.
    """
    from det_lightning import pytorch
    from det_lightning.pytorch._random_state import isolated_rng
    from det_lightning.testing import recorder

    log = recorder.TrainingLog()
    spec = spec or f"{trial.__module__}:{trial.__qualname__}"
    with tempfile.TemporaryDirectory() as directory, isolated_rng(), _torch_threads(threads):
        code = Path(directory, "code")
        code.mkdir()
        fit = {"checkpoint_storage": Path(directory, "checkpoints"), "code_dir": code, "preemption": False}
        quiet = {"enable_progress_bar": False}
        asked = dataclasses.asdict(settings)
        training = functools.partial(recorder.train, trial, pytorch, asked, log, quiet, fit)
        made = recorder.make_record("det_lightning", spec, asked, log, training)
    # As a record that was read has it: no tuples, and names of metrics are strings.
    return parse_record(json.loads(json.dumps(made)), "What was just recorded")


@contextlib.contextmanager
def _torch_threads(number: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def record_determined(
    spec: str,
    settings: RunSettings,
    *,
    directory: str | os.PathLike[str] = ".",
    python: str | os.PathLike[str] = sys.executable,
    timeout_s: float = 600,
) -> TrainingRecord:
    """Train a trial on the real determined, in a process of its own, and return what was seen.

    A trial that imports ``det_lightning`` gets determined under that name there.

    Args:
        spec: the trial as ``"module:Class"``.
        settings: what to run.
        directory: where the module is imported from, and the working directory.
        python: the interpreter to run, by default the present one; it may be one of an old environment.
        timeout_s: give up after so many seconds.

    Raises:
        RecordError: determined is not installed there, the trial can not be imported, or the process failed or took
            too long. (An error while it trains is not raised; it is in the record.)
    """
    with tempfile.TemporaryDirectory() as temporary:
        asked, output = Path(temporary, "settings.json"), Path(temporary, "record.json")
        asked.write_text(json.dumps(dataclasses.asdict(settings)))
        command = [os.fspath(python), str(_RECORDER), spec, "--settings", str(asked), "--output", str(output)]
        try:
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            message = f"{spec} did not end on determined within {timeout_s:g} s. Train fewer batches."
            raise RecordError(message) from None
        if done.returncode != 0:
            said = done.stderr.strip()[-4000:] or f"it ended with status {done.returncode} and no message"
            raise RecordError(f"{spec} can not be recorded on determined: {said}")
        record = read_record(output, spec)
    return dataclasses.replace(record, path=None)
