"""The trial beside its reference: the real determined, or a record of it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

from det_lightning.testing.options import TrialOptions
from det_lightning.testing.outcomes import BadTrial, NotChecked
from det_lightning.testing.records.comparison import Difference, Tolerance, first_difference
from det_lightning.testing.records.reference import (
    RecordError,
    RunSettings,
    TrainingRecord,
    read_record,
    record_determined,
    record_ours,
    write_record,
)
from det_lightning.testing.training.execution import TrialSetup
from det_lightning.testing.training.surroundings import quietly
from det_lightning.testing.training.trial_source import ImportedTrial

__all__ = ["Conversion", "compare_with_reference", "own_record"]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Two records of one trial.

    Attributes:
        reference: of the real determined.
        ours: of det_lightning.
        difference: the first one; None if there is none.
    """

    reference: TrainingRecord
    ours: TrainingRecord
    difference: Difference | None


def compare_with_reference(options: TrialOptions, setup: TrialSetup) -> Conversion:
    """Train on both sides, or on ours and read the other, and compare.

    Raises:
        NotChecked: there is no reference, or it tells nothing.
        BadTrial: the reference can not be read, or was made with other hyperparameters.
    """
    reference = _reference(options, setup)
    if options.record is not None:
        write_record(reference, options.record)
    if reference.error is not None:
        raise NotChecked(
            f"on the real determined the trial itself fails: {reference.error['type']}: {reference.error['message']}"
        )
    ours = own_record(setup, reference.settings, int(reference.environment.get("threads") or 0) or None)
    tolerance = None
    if options.tolerance is not None:
        tolerance = Tolerance(options.tolerance, min(options.tolerance, 1e-5), "--trial-tolerance")
    return Conversion(reference, ours, first_difference(reference, ours, tolerance))


def own_record(setup: TrialSetup, settings: RunSettings, threads: int | None = None) -> TrainingRecord:
    """Return a record of det_lightning."""
    with setup.source.imported() as trial_class, quietly():
        return record_ours(trial_class, settings, spec=setup.source.name, threads=threads)


def settings_of(options: TrialOptions, setup: TrialSetup) -> RunSettings:
    """Return what both sides run."""
    return RunSettings(
        hparams=options.hparams or {},
        config=options.config,
        arguments=setup.arguments,
        batches=options.batches,
        seed=options.seed,
        validation_period=max(1, options.batches // 2),
        aggregation_frequency=options.aggregation_frequency,
    )


def _reference(options: TrialOptions, setup: TrialSetup) -> TrainingRecord:
    if options.reference is not None:
        try:
            reference = read_record(options.reference, setup.source.name)
        except RecordError as e:
            raise BadTrial(f"--trial-reference: {e}") from None
        _require_same_hparams(options, reference)
        return reference
    if not _has_determined():
        if options.record is not None:
            raise BadTrial(
                "--trial-record needs the real determined, which is not installed here (pip install "
                "determined==0.38.1); or run the file det_lightning/testing/recorder.py where it is."
            )
        raise NotChecked(
            "the real determined is not installed here: pip install determined==0.38.1, or give --trial-reference a "
            "record that det_lightning/testing/recorder.py made where it is"
        )
    if not isinstance(setup.source, ImportedTrial):
        raise NotChecked(f"{setup.source.name} is not given by the name of its module")
    try:
        return record_determined(setup.source.spec, settings_of(options, setup), directory=setup.source.directory)
    except RecordError as e:
        raise NotChecked(str(e)) from None


def _has_determined() -> bool:
    try:
        importlib.metadata.distribution("determined")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _require_same_hparams(options: TrialOptions, reference: TrainingRecord) -> None:
    if options.hparams is None:
        return
    recorded: Mapping[str, Any] = reference.settings.hparams
    given = json.loads(json.dumps(options.hparams, default=str))
    names = [*recorded, *(name for name in given if name not in recorded)]
    other = [name for name in names if recorded.get(name) != given.get(name)]
    if other:
        listed = ", ".join(f"{name} {recorded.get(name)!r} and {given.get(name)!r} here" for name in other)
        raise BadTrial(
            f"--trial-reference {options.reference} was recorded with other hyperparameters: {listed}. Give those of "
            "the record, or record it again."
        )
