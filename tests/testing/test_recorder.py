"""The recorder: what it records, that it can be copied into an old environment, and the files of records."""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning import pytorch
from det_lightning.testing import recorder
from det_lightning.testing.records.record import RecordError, TrainingRecord, read_record
from det_lightning.testing.training.reference import record_ours
from tests.testing.recorded_trials import SETTINGS, Fails, Regression, recorded, write_record

SOURCE = Path(recorder.__file__)


def test_recorder_is_one_old_file() -> None:
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"numpy", "torch"}


def test_record_has_events_and_effects() -> None:
    record = recorded()
    assert record.error is None
    assert record.batches == 6
    order = [(e["event"], e.get("name", e["batch"])) for e in record.events]
    assert order[:5] == [
        ("start", 0),
        ("callback", "on_trial_startup"),
        ("callback", "on_training_start"),
        ("callback", "on_training_epoch_start"),
        ("batch_start", 0),
    ]
    assert order[-1] == ("end", 6)
    assert [position for event, position in order if event == "batch_end"] == list(range(6))
    assert [position for event, position in order if event == "validation"] == [3, 6]
    assert sum(position == "on_training_workload_end" for _, position in order) == 4  # after batches 2, 3, 4 and 6
    (start, *_), (end, *_) = record.select("batch_start"), record.select("batch_end")
    assert start["learning_rates"] == [[0.05]]
    assert [array["shape"] for array in start["data"]] == [[4, 3], [4, 1]]
    assert end["metrics"]["loss"]["dtype"] == "float32"
    parameters = ["model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight", "model.3.bias", "model.3.weight"]
    assert sorted(record.select("start")[0]["parameters"]) == parameters == sorted(end["gradients"])
    buffers = {"model.1.num_batches_tracked", "model.1.running_mean", "model.1.running_var"}
    assert end["weights"].keys() == {*parameters, *buffers}
    assert end["random"]["torch"] != start["random"]["torch"]  # dropout
    assert record.select("end")[0]["callbacks"]["average"]["loss"] > 0


def test_recording_changes_nothing() -> None:
    def weights(recording: bool) -> list[torch.Tensor]:
        recorder.seed_all(1)
        with pytorch.init(hparams=dict(SETTINGS.hparams), enable_tensorboard_logging=False) as context:
            log = recorder.TrainingLog()
            trial = (recorder.record_trial(Regression, pytorch, log) if recording else Regression)(context)
            if recording:
                log.start(trial)
            pytorch.Trainer(trial, context, enable_progress_bar=False).fit(
                max_length=pytorch.Batch(6), validation_period=pytorch.Batch(3), checkpoint_policy="none"
            )
        return [tensor.clone() for tensor in trial.model.state_dict().values()]

    for plain, watched in zip(weights(False), weights(True), strict=True):
        assert torch.equal(plain, watched)


def test_record_has_the_error() -> None:
    record = record_ours(Fails, SETTINGS)
    assert record.batches == 4
    assert record.error is not None
    assert (record.error["type"], record.error["message"]) == ("ArithmeticError", "the loss is not what it was")
    assert "train_batch" in record.error["traceback"]
    assert str(SOURCE) not in record.error["traceback"]
    assert record.events[-1]["event"] == "end"


def test_record_has_the_error_of_an_exit() -> None:
    def ends() -> None:
        try:
            raise ArithmeticError("too large")
        except ArithmeticError:
            raise SystemExit(0)  # noqa: B904 (as Determined does)

    error = recorder.make_record("det_lightning", "a:B", {}, recorder.TrainingLog(), ends)["error"]
    assert (error["type"], error["message"]) == ("ArithmeticError", "too large")


@given(st.floats(), st.sampled_from(["float32", "float64"]))
def test_numbers_keep_every_bit(number: float, dtype: str) -> None:
    with np.errstate(over="ignore"):
        scalar = np.float64(number).astype(dtype)
    (back,) = json.loads(json.dumps([recorder.describe(torch.tensor(scalar))]))
    assert back["dtype"] == dtype
    if math.isnan(number):
        assert math.isnan(back["value"])
    else:
        assert struct.pack("<d", back["value"]) == struct.pack("<d", float(scalar))


@given(st.integers(0, 11), st.integers(0, 31))
def test_one_bit_changes_the_digest(element: int, bit: int) -> None:
    array = np.linspace(-1, 1, 12, dtype=np.float32)
    other = array.copy()
    other.view(np.uint32)[element] ^= np.uint32(1) << np.uint32(bit)
    assert recorder.describe(array)["digest"] != recorder.describe(other)["digest"]


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.eye(3).to_sparse(),
        torch.ones(3, requires_grad=True),
        np.array(["a", "b"]),
        np.array([{"a": 1}, None], dtype=object),
        {"nested": [torch.tensor(1), None, True, "text", 1, object()]},
        torch.tensor([1 + 2j]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_becomes_json(value: Any) -> None:
    described = recorder.describe(value)
    assert json.loads(json.dumps(described)) == described


def test_mapping_is_described() -> None:
    assert recorder.describe(collections.UserDict(ids=[1, 2])) == {"ids": [1, 2]}


@pytest.mark.parametrize(("one", "other"), [(b"a", b"b"), ({1, 2}, {1, 3}), (1j, 2j)])
def test_objects_differ_by_digest(one: object, other: object) -> None:
    assert recorder.describe(one) != recorder.describe(other)
    assert recorder.describe(one)["class"] == type(one).__name__


def test_hparams_override_constants() -> None:
    model = {"depth": {"type": "int", "minval": 1, "maxval": 3}, "width": 16}
    defined = {"lr": {"type": "const", "val": 0.1}, "batch": 8, "model": model, "layers": [1, 2]}
    found = recorder.choose_hparams({"hyperparameters": defined}, {"model": {"depth": 2}, "batch": 4})
    assert found == {"lr": 0.1, "batch": 4, "model": {"depth": 2, "width": 16}, "layers": [1, 2]}
    ranges = {"a": {"type": "double"}, "b": {"c": {"type": "categorical", "vals": [1]}}}
    with pytest.raises(recorder.CannotRecord, match=r"ranges for a, b\.c"):
        recorder.choose_hparams({"hyperparameters": ranges}, {})


def test_missing_determined_is_named(tmp_path: Path) -> None:
    code = f"import runpy, sys; sys.modules['determined'] = None; runpy.run_path({str(SOURCE)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, "model_def:MyTrial", "--output", "ref.json"]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}  # otherwise the recorder starts itself again
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.returncode == 2
    assert f"determined is not installed for {sys.executable}" in done.stderr
    assert not list(tmp_path.iterdir())


# Records and their files


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
