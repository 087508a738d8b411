"""Which checkpoints are kept: the rule against a plain statement of it in SQL, and whole runs against the rule."""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning import pytorch
from det_lightning.checkpoint import (
    CheckpointContent,
    CheckpointRecord,
    CheckpointStorage,
    CheckpointWriter,
    Retention,
    TrialState,
)
from det_lightning.checkpoint.format.layout import MAX_SMALL_FILE_BYTES
from det_lightning.checkpoint.retention.pruning import RunRetention, carry_out, plan_pruning
from det_lightning.checkpoint.retention.trial_index import TrialIndex, read_indexes
from tests.trials import SmallTrial, seed_everything

# The rule

RULE = """
WITH ranked AS (
    SELECT id, written, metric,
        row_number() OVER (ORDER BY metric IS NULL, :sign * metric, written) AS experiment_rank,
        row_number() OVER (PARTITION BY trial ORDER BY metric IS NULL, :sign * metric, written) AS trial_rank,
        row_number() OVER (PARTITION BY trial ORDER BY written DESC) AS recency_rank
    FROM checkpoints
)
SELECT id FROM ranked
WHERE ((experiment_rank > :E AND trial_rank > :T) OR metric IS NULL) AND recency_rank > :L
ORDER BY written
"""


def delete_by_sql(records: list[CheckpointRecord], retention: Retention, smaller_is_better: bool) -> list[str]:
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE checkpoints (id TEXT, trial TEXT, written REAL, metric REAL)")
        rows = [(r.id, r.trial, r.order, r.metric if r.has_metric else None) for r in records]
        database.executemany("INSERT INTO checkpoints VALUES (?, ?, ?, ?)", rows)
        numbers = {"E": retention.experiment_best, "T": retention.trial_best, "L": retention.trial_latest}
        found = database.execute(RULE, {**numbers, "sign": 1 if smaller_is_better else -1})
        return [name for (name,) in found]


METRICS = st.none() | st.just(math.nan) | st.sampled_from([0.0, -0.0, 1.0, 2.0, math.inf, -math.inf]) | st.floats()


@st.composite
def records(draw: st.DrawFn) -> list[CheckpointRecord]:
    orders = draw(st.lists(st.integers(0, 1000), max_size=14, unique=True))
    trials = st.sampled_from(["one", "two", "three"])
    return [CheckpointRecord(f"id{order}", draw(trials), order, float(order), draw(METRICS)) for order in orders]


@pytest.mark.slow
@settings(max_examples=400)
@given(
    records=records(),
    numbers=st.tuples(*[st.integers(0, 4)] * 3),
    smaller_is_better=st.booleans(),
)
def test_the_rule_is_that_of_determined(
    records: list[CheckpointRecord], numbers: tuple[int, int, int], smaller_is_better: bool
) -> None:
    retention = Retention(*numbers)
    chosen = retention.choose_to_delete(records, smaller_is_better)
    assert chosen == delete_by_sql(records, retention, smaller_is_better)


def test_by_default_the_best_and_the_latest_of_each_trial_are_kept() -> None:
    metrics: dict[str, list[float | None]] = {"a": [3.0, 1.0, 1.0, 2.0], "b": [5.0, None, 6.0, math.nan]}
    records = [
        CheckpointRecord(f"{trial}{i}", trial, i, 10 * i + (trial == "b"), metric)
        for trial, values in metrics.items()
        for i, metric in enumerate(values)
    ]
    kept = {record.id for record in records} - set(Retention().choose_to_delete(records))
    assert kept == {"a1", "a3", "b0", "b3"}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, None),
        ({"type": "s3", "save_trial_best": None}, None),
        ({"save_trial_best": 0}, Retention(0, 0, 1)),
        ({"save_experiment_best": 2, "save_trial_latest": 3}, Retention(2, 1, 3)),
    ],
    ids=str,
)
def test_a_section_without_numbers_keeps_all(section: dict[str, Any], expected: Retention | None) -> None:
    assert Retention.from_config(section) == expected


def test_all_wrong_numbers_are_named() -> None:
    section = {"save_experiment_best": -1, "save_trial_best": 1.5, "save_trial_latest": True}
    with pytest.raises(ValueError, match=r"save_experiment_best=-1, save_trial_best=1\.5, save_trial_latest=True"):
        Retention.from_config(section)


# Retention during a run


def files_of(steps: int, notes: dict[str, Any] | None = None) -> CheckpointContent:
    return CheckpointContent({}, TrialState(batches_trained=steps), {}, None, notes=notes or {})


def retention_of(storage: CheckpointStorage, trial: str, retention: Retention) -> RunRetention:
    return RunRetention(storage, TrialIndex(storage.root, "experiment", trial, "loss"), retention)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    writes=st.lists(st.tuples(st.sampled_from(["one", "two"]), METRICS), max_size=8),
    numbers=st.tuples(*[st.integers(0, 2)] * 3),
)
def test_after_each_checkpoint_a_trial_has_kept_what_the_rule_keeps(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, float | None]], numbers: tuple[int, int, int]
) -> None:
    storage, retention = CheckpointStorage(tmp_path_factory.mktemp("storage")), Retention(*numbers)
    there: list[CheckpointRecord] = []
    for steps, (trial, metric) in enumerate(writes):
        name = CheckpointWriter(storage).write(files_of(steps))
        # An object of its own each time, as after a restart.
        retention_of(storage, trial, retention).note_written(name, steps, metric)
        there.append(CheckpointRecord(name, trial, steps, steps, metric))
        deleted = delete_by_sql(there, retention, smaller_is_better=True)
        # Each trial deletes its own.
        there = [record for record in there if record.id not in deleted or record.trial != trial]
        assert storage.list_ids() == sorted(record.id for record in there)


def test_a_clock_that_is_set_back_does_not_change_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = CheckpointStorage(tmp_path)
    retention = retention_of(storage, "trial", Retention(0, 0, 1))
    for steps, now in enumerate((1000.0, 500.0, 500.0)):
        name = CheckpointWriter(storage).write(files_of(steps))
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda now=now: now)
            retention.note_written(name, steps, None)
        assert storage.list_ids() == [name]


def test_a_checkpoint_that_was_removed_by_hand_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = CheckpointStorage(tmp_path)
    retention = retention_of(storage, "trial", Retention(0, 0, 1))
    for steps in range(2):
        name = CheckpointWriter(storage).write(files_of(steps))
        retention.note_written(name, steps, None)
        storage.delete(name)
    assert "was deleted by someone else" in caplog.text
    (index,) = read_indexes(storage.root, "experiment")
    assert [record.id for record in index.records] == [name]


def test_a_metric_counts_for_the_latest_checkpoint_only(tmp_path: Path) -> None:
    """A trial that went back to an earlier batch has an older checkpoint of the same batch."""
    storage = CheckpointStorage(tmp_path)
    retention = retention_of(storage, "trial", Retention(0, 1, 9))
    for steps in (5, 9, 5):
        retention.note_written(CheckpointWriter(storage).write(files_of(steps)), steps, None)
    retention.note_metric(9, 1.0)
    retention.note_metric(5, 2.0)
    (index,) = read_indexes(storage.root, "experiment")
    assert [(record.steps_completed, record.metric) for record in index.records] == [(5, None), (9, None), (5, 2.0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"checkpoints": [1]}',
        b'{"checkpoints": null}',
        b'{"checkpoints": [{"id": "x"}]}',
        b'{"checkpoints": [{"id": "x", "trial": "t", "steps_completed": 1, "order": "late"}]}',
        b'{"checkpoints": [{"id": "x", "trial": "t", "steps_completed": 1, "order": 1, "metric": "good"}]}',
        b'{"checkpoints": [{"id": ["x"], "trial": "t", "steps_completed": 1, "order": 1}]}',
        b'{"checkpoints": [{"id": "x", "trial": "t", "steps_completed": 1, "order": 1e300}]}',
        b" " * (MAX_SMALL_FILE_BYTES + 5),
    ],
    ids=lambda content: content[:60].decode(errors="replace").strip() or f"{len(content)} blanks",
)
def test_a_damaged_index_is_rebuilt_from_the_checkpoints(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    storage = CheckpointStorage(tmp_path)
    notes = {"experiment": "experiment", "trial": "trial"}
    metrics = {steps: {"name": "loss", "value": value} for steps, value in ((1, 3.0), (2, 1.0), (3, 2.0))}
    ids = [CheckpointWriter(storage).write(files_of(steps, {**notes, "metric": metrics[steps]})) for steps in metrics]
    CheckpointWriter(storage).write(files_of(9, {**notes, "trial": "other"}))
    file = tmp_path / ".det_lightning/index/experiment/trial.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    (index,) = read_indexes(storage.root)
    assert [(record.id, record.metric) for record in index.records] == [*zip(ids, (3.0, 1.0, 2.0), strict=True)]
    assert index.metric_name == "loss"
    assert f"The index {file} is damaged" in caplog.text
    if len(content) > MAX_SMALL_FILE_BYTES:
        assert f"({file} has 16,777,221 bytes, and no more than 16,777,216 are read). It is rebuilt" in caplog.text
    retention_of(storage, "trial", Retention()).note_metric(3, 2.0)
    retention_of(storage, "trial", Retention()).note_written(
        CheckpointWriter(storage).write(files_of(4, notes)), 4, None
    )
    (index,) = read_indexes(storage.root)
    assert [record.steps_completed for record in index.records] == [2, 4]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a" * 129, "ü"])
def test_a_name_that_is_not_a_valid_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="The name of the trial is used as a file name"):
        TrialIndex(CheckpointStorage(tmp_path).root, "experiment", name)


# Whole runs


@dataclasses.dataclass
class Run:
    """A run whose validations return the values of a list, one after another."""

    storage: Path
    metrics: dict[int, float | None]

    def fit(self, max_length: int, latest: str | None = None, **arguments: Any) -> None:
        metrics = self.metrics

        class Trial(SmallTrial):
            def evaluate_batch(self, batch: Any) -> dict[str, Any]:
                return {"loss": metrics[self.context.current_train_batch() + 1]}

        seed_everything()
        searcher = {"metric": "loss", "smaller_is_better": arguments.pop("smaller_is_better", True)}
        with pytorch.init(hparams={}, exp_conf={"searcher": searcher}, enable_tensorboard_logging=False) as context:
            pytorch.Trainer(Trial(context), context, enable_progress_bar=False).fit(
                max_length=pytorch.Batch(max_length),
                validation_period=pytorch.Batch(2),
                checkpoint_storage=self.storage,
                latest_checkpoint=latest,
                **{"checkpoint_policy": "all", **arguments},
            )

    def kept(self) -> list[int]:
        storage = CheckpointStorage(self.storage)
        return sorted(storage.read_metadata(name)["steps_completed"] for name in storage.list_ids())


def expected(metrics: dict[int, float | None], retention: Retention, smaller_is_better: bool = True) -> list[int]:
    """Return what is left when the rule is applied after each checkpoint."""
    there: list[CheckpointRecord] = []
    for steps, metric in metrics.items():
        there.append(CheckpointRecord(str(steps), "trial", steps, steps, metric))
        deleted = delete_by_sql(there, retention, smaller_is_better)
        there = [record for record in there if record.id not in deleted]
    return [record.steps_completed for record in there]


METRICS_OF_RUN: dict[int, float | None] = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: 7.0, 12: 6.0}
RETENTIONS = [Retention(), Retention(0, 0, 1), Retention(0, 2, 0), Retention(3, 1, 2), Retention(0, 0, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("async_write", [False, True])
@pytest.mark.parametrize("smaller_is_better", [True, False])
@pytest.mark.parametrize("retention", RETENTIONS, ids=str)
def test_a_run_applies_the_rule(
    tmp_path: Path, retention: Retention, smaller_is_better: bool, async_write: bool
) -> None:
    run = Run(tmp_path, METRICS_OF_RUN)
    run.fit(12, retention=retention, smaller_is_better=smaller_is_better, async_write=async_write)
    assert run.kept() == expected(METRICS_OF_RUN, retention, smaller_is_better)


@pytest.mark.parametrize("stop", [4, 8])
def test_a_resumed_run_knows_the_kept_checkpoints(tmp_path: Path, stop: int) -> None:
    run, retention = Run(tmp_path, METRICS_OF_RUN), Retention(0, 2, 1)
    run.fit(stop, retention=retention)
    assert run.kept() == expected({s: m for s, m in METRICS_OF_RUN.items() if s <= stop}, retention)
    run.fit(12, latest="last", retention=retention)
    assert run.kept() == expected(METRICS_OF_RUN, retention) == [4, 8, 12]


def test_a_run_that_resumes_from_a_link_counts_its_target(tmp_path: Path) -> None:
    run, retention = Run(tmp_path, METRICS_OF_RUN), Retention(0, 2, 1)
    run.fit(4, retention=Retention(0, 1, 1))
    (first,) = CheckpointStorage(tmp_path).list_ids()
    (tmp_path / "latest").symlink_to(first)
    run.fit(12, latest="latest", retention=retention)
    assert run.kept() == [4, 8, 12]
    assert (tmp_path / "latest").readlink() == Path(first)
    (index,) = read_indexes(CheckpointStorage(tmp_path).root)
    assert [record.steps_completed for record in index.records] == [4, 8, 12]


@pytest.mark.slow
def test_another_run_in_the_same_storage_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, METRICS_OF_RUN)
    run.fit(6)
    run.fit(12, retention=Retention(0, 0, 1))
    assert run.kept() == [2, 4, 6, 12]


def test_without_a_rule_all_checkpoints_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, METRICS_OF_RUN)
    run.fit(12)
    assert run.kept() == [2, 4, 6, 8, 10, 12]
    assert not (tmp_path / ".det_lightning").exists()


@pytest.mark.parametrize("async_write", [False, True])
@pytest.mark.parametrize("last", [1.0, 9.0])
def test_a_metric_of_a_validation_after_the_checkpoint_of_its_batch_counts(
    tmp_path: Path, last: float, async_write: bool
) -> None:
    metrics = {**METRICS_OF_RUN, 12: last}
    run, retention = Run(tmp_path, metrics), Retention(0, 1, 1)
    run.fit(
        12,
        checkpoint_period=pytorch.Batch(2),
        checkpoint_policy="none",
        retention=retention,
        async_write=async_write,
    )
    assert run.kept() == ([12] if last == 1.0 else [4, 12])
    (file,) = (tmp_path / ".det_lightning/index").glob("*/*.json")
    noted = {entry["steps_completed"]: entry["metric"] for entry in json.loads(file.read_text())["checkpoints"]}
    assert noted == {steps: metrics[steps] for steps in run.kept()}


def test_checkpoints_without_a_metric_are_kept_only_while_they_are_the_latest(tmp_path: Path) -> None:
    run = Run(tmp_path, METRICS_OF_RUN)
    run.fit(12, checkpoint_period=pytorch.Batch(3), checkpoint_policy="all", retention=Retention(0, 1, 2))
    by_step: dict[int, float | None] = {steps: METRICS_OF_RUN.get(steps) for steps in (2, 3, 4, 6, 8, 9, 10, 12)}
    assert run.kept() == expected(by_step, Retention(0, 1, 2)) == [4, 10, 12]


def test_checkpoints_written_without_retention_can_be_pruned_later(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    ids = []
    for step, value in enumerate([3.0, 1.0, 2.0, 4.0]):
        metric = {"name": "loss", "value": value, "smaller_is_better": True}
        notes = {"experiment": "e", "trial": "t", "metric": metric, "time": float(step)}
        files = CheckpointContent({}, TrialState(batches_trained=step), {}, None, notes=notes)
        ids.append(CheckpointWriter(storage).write(files))
    plan = plan_pruning(storage, Retention(experiment_best=0, trial_best=1, trial_latest=1))
    assert plan.to_delete == [ids[0], ids[2]]
    assert carry_out(plan, storage) == plan.to_delete
    assert storage.list_ids() == sorted([ids[1], ids[3]])
