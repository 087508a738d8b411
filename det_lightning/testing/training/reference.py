"""Compares the trial with its reference: a record of the real determined, made here or read from a file.

Change here: ``--trial-tolerance`` counts here and in ``testing/checks/old_checkpoints.py``.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from det_lightning.files.plain_values import as_plain
from det_lightning.testing import recorder
from det_lightning.testing.checks import BadTrial, NotCompared
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.records.comparison import first_difference
from det_lightning.testing.records.difference import Difference, Tolerance
from det_lightning.testing.records.record import RecordError, RunSettings, TrainingRecord, parse_record, read_record
from det_lightning.testing.training.execution import RunPlan, train
from det_lightning.testing.training.in_processes import HASH_SEED, train_in_processes
from det_lightning.testing.training.trial_source import GivenTrial, ImportedTrial, TrialSource

#: The records of a trial on the real determined and here, and their first difference.
Conversion = tuple[TrainingRecord, TrainingRecord, Difference | None]


def compare_with_reference(options: TrialOptions, source: TrialSource, settings: RunSettings) -> Conversion:
    """Train on both sides, or read the record of the reference, and compare both."""
    reference = _find_reference(options, source, settings)
    if (error := reference.error) is not None:
        raise NotCompared(f"on the real determined the trial itself fails: {error['type']}: {error['message']}")
    threads = int(reference.environment.get("threads") or 0) or None
    given = options.tolerance
    tolerance = None if given is None else Tolerance(given, min(given, 1e-5), "--trial-tolerance")
    ours = _record_in_process(source, reference, threads)
    return reference, ours, first_difference(reference, ours, tolerance)


def _record_in_process(source: TrialSource, reference: TrainingRecord, threads: int | None) -> TrainingRecord:
    """Train in a process with the hash seed of the reference, on which the order of a set of strings depends."""
    seed = str(reference.environment.get("hash_seed") or HASH_SEED)
    with tempfile.TemporaryDirectory() as directory:
        plan = RunPlan("det_lightning", reference.settings, Path(directory, "checkpoints"), threads=threads)
        ((result,),) = train_in_processes(source, [([plan], None)], seed)
    return _convert_to_json(result.record)


def _find_reference(options: TrialOptions, source: TrialSource, settings: RunSettings) -> TrainingRecord:
    if options.reference is not None:
        try:
            reference = read_record(options.reference, source.name)
        except RecordError as e:
            raise BadTrial(f"--trial-reference: {e}") from None
        _require_same_hparams(options, reference)
        return reference
    if not any(importlib.metadata.distributions(name="determined")):
        raise NotCompared(
            "the real determined is not installed here: pip install determined==0.38.1, or pass --trial-reference a "
            "record made by det_lightning/testing/recorder.py where determined is installed"
        )
    if not isinstance(source, ImportedTrial):
        raise NotCompared(f"{source.name} was not given as MODULE:CLASS")
    try:
        return record_determined(source.spec, settings, directory=source.directory)
    except RecordError as e:
        raise NotCompared(str(e)) from None


def _require_same_hparams(options: TrialOptions, reference: TrainingRecord) -> None:
    if options.hparams is None:
        return
    recorded = reference.settings.hparams
    given = as_plain(options.hparams, "hparams")
    names = dict.fromkeys([*recorded, *given])
    if other := [name for name in names if recorded.get(name) != given.get(name)]:
        listed = ", ".join(f"{name} {recorded.get(name)!r} and {given.get(name)!r} here" for name in other)
        raise BadTrial(
            f"--trial-reference {options.reference} was recorded with other hyperparameters: {listed}. Pass the "
            "hyperparameters of the record, or record again."
        )


def record_ours(trial: type | TrialSource, settings: RunSettings, *, threads: int | None = None) -> TrainingRecord:
    """Train a trial on det_lightning in this process, with as many threads as the reference; return the record."""
    source = GivenTrial(trial) if isinstance(trial, type) else trial
    with tempfile.TemporaryDirectory() as directory:
        storage = Path(directory, "checkpoints")
        run = train(source, RunPlan("det_lightning", settings, storage, threads=threads))
    return _convert_to_json(run.record)


def _convert_to_json(record: TrainingRecord) -> TrainingRecord:
    """Return the record as it is read from a file: without tuples, and with strings as names of metrics."""
    return parse_record(json.loads(json.dumps(record.content())), "The new record")


def record_determined(spec: str, settings: RunSettings, *, directory: str | os.PathLike[str] = ".") -> TrainingRecord:
    """Train a trial on the real determined in a separate process; raises RecordError if nothing could be recorded."""
    with tempfile.TemporaryDirectory() as temporary:
        options = Path(temporary, "settings.json")
        output = Path(temporary, "record.json")
        options.write_text(json.dumps(dataclasses.asdict(settings)))
        command = [sys.executable, recorder.__file__, spec, "--settings", str(options), "--output", str(output)]
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            reason = done.stderr.strip()[-4000:] or f"it ended with status {done.returncode} and no message"
            raise RecordError(f"{spec} cannot be recorded on determined: {reason}")
        return read_record(output, spec)
