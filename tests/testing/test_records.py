"""Records of trainings, and their files."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning.testing.records.record import RecordError, TrainingRecord, read_record
from det_lightning.testing.training.reference import record_ours
from tests.testing.recorded_trials import SETTINGS, Regression, recorded, write_record


@pytest.fixture
def record() -> TrainingRecord:
    return copy.deepcopy(recorded())


def test_record_round_trips(record: TrainingRecord, tmp_path: Path) -> None:
    write_record(record, tmp_path / "ref.json")
    assert read_record(tmp_path / "ref.json", "elsewhere:Regression") == record
    with pytest.raises(RecordError, match=r"must be a record of model_def:Other; got a record of .*:Regression"):
        read_record(tmp_path / "ref.json", "model_def:Other")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no file .*ref.json. Make a record .* python recorder.py model_def:Regression"),
        ("", "is not a record of a training, or is damaged"),
        ('{"format": "det-lightning training re', "is damaged"),
        ("[" * 100_000, "is not a record of a training, or is damaged"),
        ("[1, 2]", "is JSON, but not a record"),
        ('{"loss": 0.1}', "is JSON, but not a record"),
    ],
)
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "ref.json").write_text(content)
    with pytest.raises(RecordError, match=message):
        read_record(tmp_path / "ref.json", "model_def:Regression")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.update(version=2), "version 2 .* reads 1"),
        (lambda content: content.pop("events"), r"damaged: KeyError\('events'\)"),
        (lambda content: content["settings"].update(sed=1), "damaged: TypeError.*'sed'"),
    ],
)
def test_damaged_records_are_refused(damage: Any, message: str, record: TrainingRecord, tmp_path: Path) -> None:
    write_record(record, tmp_path / "ref.json")
    content = json.loads((tmp_path / "ref.json").read_text())
    damage(content)
    (tmp_path / "ref.json").write_text(json.dumps(content))
    with pytest.raises(RecordError, match=message):
        read_record(tmp_path / "ref.json")


def test_random_state_and_threads_stay() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert record_ours(Regression, SETTINGS, threads=threads + 1).environment["threads"] == threads + 1
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_constructor_gets_arguments() -> None:
    made = record_ours(Regression, dataclasses.replace(SETTINGS, arguments={"width": 2}))
    assert made.select("start")[0]["weights"]["model.0.weight"]["shape"] == [2, 3]


def test_curves_have_the_scalar_metrics(record: TrainingRecord) -> None:
    assert [batch for batch, _ in record.curves("batch_end")["loss"]] == list(range(6))
    assert [batch for batch, _ in record.curves("validation")["validation_loss"]] == [3, 6]
