"""Which checkpoints are kept: the rule against a plain statement of it in SQL, and whole runs against the rule."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning import errors, pytorch
from det_lightning.checkpoint import (
    CheckpointContent,
    CheckpointPolicy,
    CheckpointRecord,
    CheckpointStorage,
    Retention,
    TrialState,
    load_checkpoint,
)
from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
from det_lightning.checkpoint.retention.trial_checkpoints import TrialCheckpoints
from det_lightning.checkpoint.safe_load import verify_checkpoint
from tests.checkpoint.made_checkpoints import train
from tests.checkpoint.storage.backends import files_of
from tests.trials import SmallTrial

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
@settings(max_examples=200)
@given(records=records(), numbers=st.tuples(*[st.integers(0, 4)] * 3), smaller_is_better=st.booleans())
def test_rule_is_that_of_determined(
    records: list[CheckpointRecord], numbers: tuple[int, int, int], smaller_is_better: bool
) -> None:
    chosen = Retention(*numbers).choose_to_delete(records, smaller_is_better)
    assert chosen == delete_by_sql(records, Retention(*numbers), smaller_is_better)


def test_section_gives_the_numbers() -> None:
    assert Retention.from_config({}) is None
    assert Retention.from_config({"type": "s3", "save_trial_best": None}) is None
    assert Retention.from_config({"save_trial_best": 0}) == Retention(0, 0, 1)
    assert Retention.from_config({"save_experiment_best": 2, "save_trial_latest": 3}) == Retention(2, 1, 3)


def test_all_wrong_numbers_are_named() -> None:
    section = {"save_experiment_best": -1, "save_trial_best": 1.5, "save_trial_latest": True}
    with pytest.raises(ValueError, match=r"save_experiment_best=-1, save_trial_best=1\.5, save_trial_latest=True"):
        Retention.from_config(section)


# Retention during a run


TRIAL: dict[str, Any] = {"experiment": "experiment", "trial": "trial"}


def checkpoints_of(storage: CheckpointStorage, retention: Retention) -> TrialCheckpoints:
    """Return what a new run knows of the trial."""
    policy = CheckpointPolicy("none", metric="loss", retention=retention)
    checkpoints = TrialCheckpoints(storage, policy, "experiment", "trial")
    checkpoints.learn()
    return checkpoints


def write(storage: CheckpointStorage, checkpoints: TrialCheckpoints, steps: int, metric: float | None = None) -> str:
    """Write a checkpoint of the trial called ``trial``, and note it."""
    described = checkpoints.describe_next(metric)
    name = storage.write(files_of(steps, {**TRIAL, **described}))
    checkpoints.add(name, steps, described["time"], metric)
    return name


def steps_of(storage: CheckpointStorage) -> list[int]:
    return sorted(info.metadata["steps_completed"] for info in storage.list_checkpoints())


@pytest.mark.slow
@settings(max_examples=15)
@given(writes=st.lists(METRICS, max_size=8), numbers=st.tuples(*[st.integers(0, 2)] * 3))
def test_trial_follows_the_rule(
    tmp_path_factory: pytest.TempPathFactory, writes: list[float | None], numbers: tuple[int, int, int]
) -> None:
    storage, retention = CheckpointStorage(tmp_path_factory.mktemp("storage")), Retention(*numbers)
    for steps, metric in enumerate(writes):
        # Known anew each time, as after a restart.
        write(storage, checkpoints_of(storage, retention), steps, metric)
        assert steps_of(storage) == expected(dict(enumerate(writes[: steps + 1])), retention)


def test_clock_set_back_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = CheckpointStorage(tmp_path)
    for steps, now in enumerate((1000.0, 500.0, 500.0)):
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda now=now: now)
            name = write(storage, checkpoints_of(storage, Retention(0, 0, 1)), steps)
        assert storage.list_ids() == [name]


def test_removed_by_hand_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = CheckpointStorage(tmp_path)
    checkpoints = checkpoints_of(storage, Retention(0, 0, 1))
    for steps in range(3):
        name = write(storage, checkpoints, steps)
        storage.delete(name)
    assert caplog.text.count("was deleted by another process") == 2


def test_metric_counts_for_the_latest(tmp_path: Path) -> None:
    """A trial that went back to an earlier batch has an older checkpoint of the same batch."""
    storage = CheckpointStorage(tmp_path)
    checkpoints = checkpoints_of(storage, Retention(0, 1, 9))
    ids = [write(storage, checkpoints, steps) for steps in (5, 9, 5)]
    checkpoints.note_metric(9, 1.0)
    checkpoints.note_metric(5, math.nan)
    metrics = [storage.info(name).metadata.get("metric") for name in ids]
    assert metrics == [None, None, {"name": "loss", "value": "NaN", "smaller_is_better": True}]
    assert verify_checkpoint(tmp_path / ids[2]).problems == []


def test_another_metric_does_not_count(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    accuracy = {"name": "accuracy", "value": 0.1}
    for steps, metric in ((1, accuracy), (2, {"name": "loss", "value": 0.5}), (3, accuracy)):
        storage.write(files_of(steps, {**TRIAL, "metric": metric}))
    checkpoints_of(storage, Retention(0, 2, 0)).finish()
    assert steps_of(storage) == [2]
    storage.write(files_of(4, {**TRIAL, "trial": "other", "metric": accuracy}))
    with pytest.raises(ValueError, match=r"by different metrics .*: 'accuracy', smaller"):
        plan_pruning(storage, Retention())


# Whole runs


METRICS_OF_RUN: dict[int, float | None] = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: 7.0, 12: 6.0}


def run(storage: Path, length: int = 12, latest: str | None = None, last: float = 6.0, **rules: Any) -> list[int]:
    """Train with validations that return the values of a list; return the numbers of batches of what is kept."""

    class Trial(SmallTrial):
        def evaluate_batch(self, batch: Any) -> dict[str, Any]:
            return {"loss": {**METRICS_OF_RUN, 12: last}[self.context.current_train_batch() + 1]}

    train(storage, length, latest, trial=Trial, **{"policy": "all", "period": None, "metric": "loss", **rules})
    return steps_of(CheckpointStorage(storage))


def expected(metrics: dict[int, float | None], retention: Retention, smaller_is_better: bool = True) -> list[int]:
    """Return what is left when the rule is applied after each checkpoint."""
    # While a trial runs, it keeps as many of its own best as the whole experiment.
    rule = Retention(0, max(retention.experiment_best, retention.trial_best), retention.trial_latest)
    there: list[CheckpointRecord] = []
    for steps, metric in metrics.items():
        there.append(CheckpointRecord(str(steps), "trial", steps, steps, metric))
        deleted = delete_by_sql(there, rule, smaller_is_better)
        there = [record for record in there if record.id not in deleted]
    return [record.steps_completed for record in there]


@pytest.mark.slow
def test_run_applies_the_rule_in_the_background(tmp_path: Path) -> None:
    retention = Retention(3, 1, 2)
    kept = run(tmp_path, retention=retention, smaller_is_better=False, async_write=True)
    assert kept == expected(METRICS_OF_RUN, retention, smaller_is_better=False)


def test_resumed_run_knows_its_trial(tmp_path: Path) -> None:
    for stop, kept in ((4, [2, 4]), (8, [4, 8]), (12, [4, 8, 12])):
        so_far = {steps: metric for steps, metric in METRICS_OF_RUN.items() if steps <= stop}
        assert run(tmp_path, stop, "last", retention=Retention(0, 2, 1)) == expected(so_far, Retention(0, 2, 1)) == kept


def test_resume_from_a_link_deletes_nothing(tmp_path: Path) -> None:
    run(tmp_path, 4, retention=Retention(0, 1, 1))
    (first,) = CheckpointStorage(tmp_path).list_ids()
    (tmp_path / "latest").symlink_to(first)
    assert run(tmp_path, latest="latest", retention=Retention(0, 2, 1)) == [4, 8, 12]
    assert (tmp_path / "latest").readlink() == Path(first)


def test_resumed_run_deletes_nothing_before_its_first_save(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    ids = [storage.write(files_of(steps, TRIAL)) for steps in (1, 2, 3)]
    policy = CheckpointPolicy("none", retention=Retention(0, 0, 1))
    checkpoints = TrialCheckpoints(storage, policy, "experiment", "trial", parent=load_checkpoint(tmp_path / ids[2]))
    checkpoints.learn()
    checkpoints.note_metric(3, 1.0)
    assert steps_of(storage) == [1, 2, 3]
    write(storage, checkpoints, 4)
    assert steps_of(storage) == [4]


def test_damaged_checkpoint_gets_no_metric(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    checkpoints = checkpoints_of(storage, Retention(0, 0, 9))
    gone, damaged = write(storage, checkpoints, 1), write(storage, checkpoints, 2)
    metadata = tmp_path / damaged / "metadata.json"
    metadata.write_text(metadata.read_text().replace("torch-", "other-"))
    before = metadata.read_text()
    checkpoints.note_metric(2, 0.5)
    assert metadata.read_text() == before
    storage.delete(damaged)
    storage.delete(gone)
    checkpoints.note_metric(2, 0.5)
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(errors.StorageError, match="2 checkpoints that this run has written"):
        checkpoints.finish()


def test_prune_compares_the_latest_metric(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path)
    metrics = {1: ("accuracy", 0.1), 2: ("loss", 0.5), 3: ("loss", 0.2), 4: ("loss", 0.4)}
    for steps, (name, value) in metrics.items():
        storage.write(files_of(steps, {**TRIAL, "time": float(steps), "metric": {"name": name, "value": value}}))
    carry_out(plan_pruning(storage, Retention(0, 1, 1)), storage)
    assert steps_of(storage) == [3, 4]


def test_without_a_rule_all_are_kept(tmp_path: Path) -> None:
    assert run(tmp_path, 6) == [2, 4, 6]
    assert not (tmp_path / ".det_lightning").exists()
    assert run(tmp_path, 10, retention=Retention(0, 0, 1)) == [2, 4, 6, 10], "another run lost some"


@pytest.mark.parametrize(("last", "async_write"), [(1.0, False), (9.0, True)])
def test_metric_after_the_checkpoint_is_noted(tmp_path: Path, last: float, async_write: bool) -> None:
    rules: dict[str, Any] = {"period": pytorch.Batch(2), "policy": "none", "retention": Retention(0, 1, 1)}
    run(tmp_path, last=last, async_write=async_write, **rules)
    noted = [info.metadata for info in CheckpointStorage(tmp_path).list_checkpoints()]
    found = {metadata["steps_completed"]: metadata["metric"]["value"] for metadata in noted}
    assert found == ({12: 1.0} if last == 1.0 else {4: 3.0, 12: 9.0})


@pytest.mark.slow
def test_next_run_finishes_a_deletion(tmp_path: Path) -> None:
    """The next run has no checkpoint to write, after which it would try again."""
    writing: dict[str, Any] = {"period": pytorch.Batch(1), "retention": Retention(0, 0, 1)}
    train(tmp_path, 2, **writing)
    storage = CheckpointStorage(tmp_path)
    (kept,) = storage.list_ids()
    names = {name: storage.info(kept).metadata[name] for name in ("experiment", "trial")}
    storage.write(CheckpointContent({}, TrialState(batches_trained=1), notes={**names, "time": 1.0}))
    train(tmp_path, 2, kept, **writing)
    assert [path.name for path in tmp_path.iterdir()] == [kept]
