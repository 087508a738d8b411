"""Reports of a script: what Determined's master refuses is refused, and what TensorBoard's files hold of the others."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import det_lightning
from det_lightning import core
from det_lightning.core._reports import select_scalars
from det_lightning.core._task import TASK_VARIABLE, TrialTask, default_directory
from det_lightning.core._tensorboard import EventFile, TensorBoardOutput
from tests.ranks.ranks import ends_of, start_forked


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialTask:
    """A run of a trial, which this process becomes."""
    config = {"data": {"url": "here"}, "searcher": {"name": "single"}, "debug": True}
    checkpoints = str(tmp_path / "checkpoints")
    task = TrialTask(tmp_path / "trial", 3, 2, 1, 42, {"lr": 0.1}, config, [0], checkpoints, "some-id", 7)
    task.directory.mkdir()
    task.write()
    monkeypatch.setenv(TASK_VARIABLE, str(task.file))
    return task


@pytest.fixture(params=["alone", "in an experiment"])
def context(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[core.Context]:
    if request.param == "in an experiment":
        request.getfixturevalue("task")
    with core.init(checkpoint_storage=str(tmp_path / "checkpoints")) as context:
        yield context


def report(context: core.Context, group: str, steps: Any, metrics: dict[str, Any]) -> None:
    """Report with the method that scripts use for the group."""
    methods = {"training": context.train.report_training_metrics, "validation": context.train.report_validation_metrics}
    methods.get(group, functools.partial(context.train.report_metrics, group))(steps, metrics)


@pytest.mark.parametrize("group", ["training", "validation", "inference"])
@pytest.mark.parametrize(
    ("steps", "metrics", "named"),
    [
        (-1, {}, "steps_completed must be a .*number, at least 0; got -1"),
        ("7", {}, "got '7'"),
        (True, {}, "got True"),
        (float("nan"), {}, "got 'NaN'"),
        (1, {"epoch": "first"}, "'epoch' must be a finite number; got 'first'"),
        (1, {"epoch": True}, "got True"),
        (1, {"epoch": float("inf")}, "got 'Infinity'"),
        (-1, {"epoch": "first"}, "got -1; the metric 'epoch' must be a finite number; got 'first'"),
    ],
)
def test_wrong_steps_and_epochs_are_named(
    context: core.Context, group: str, steps: Any, metrics: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"'{group}'.*{named}"):
        report(context, group, steps, {"loss": 1.0, **metrics})


def test_steps_may_be_numbers_of_any_library(context: core.Context) -> None:
    for steps, epoch in [(0, 0), (np.int64(1), 0.5), (2.0, np.float32(1.5)), (torch.tensor(3), torch.tensor(2))]:
        context.train.report_training_metrics(steps, {"epoch": epoch})


def test_steps_of_a_trial_are_integers(task: TrialTask) -> None:
    with core.init() as context:
        for steps in (np.int64(1), 2.0):
            report(context, "validation", steps, {"loss": 1.0})
        with pytest.raises(ValueError, match=r"whole number, at least 0; got 2\.5"):
            report(context, "validation", 2.5, {"loss": 1.0})
        for steps in (-1, "last", 2.5):
            with pytest.raises(ValueError, match="metadata of a checkpoint steps_completed must be a whole number"):
                context.checkpoint.upload(task.directory, {"steps_completed": steps})
    records = [json.loads(line) for line in task.metrics_file.read_text().splitlines()]
    assert [record["steps_completed"] for record in records] == [1, 2]


@pytest.mark.parametrize("group", ["training", "validation", "inference"])
def test_a_metric_has_one_value_for_a_step(context: core.Context, group: str) -> None:
    report(context, group, 5, {"loss": 1.0, "error": 1.0})
    report(context, group, 5, {"accuracy": 0.5})  # another metric
    report(context, group, 6, {"loss": 0.5})  # another step
    report(context, "other", 5, {"loss": 0.5})  # another group
    with pytest.raises(ValueError, match=f"'{group}' cannot be reported: 'error', 'loss' had a value after 5 steps"):
        context.train.report_metrics(group, np.int64(5), {"loss": 1.0, "error": 0.5, "new": 1})
    report(context, group, 5, {"new": 1})  # nothing of a refused report was kept


def test_batch_metrics_are_reported_once_for_a_step(context: core.Context) -> None:
    context.train.report_training_metrics(1, {"loss": 1.0}, [{"loss": 1.0}])
    with pytest.raises(ValueError, match="'batch_metrics' had a value after 1 steps"):
        context.train.report_training_metrics(1, {"error": 1.0}, [{"loss": 1.0}])


def test_restart_reports_a_step_again(task: TrialTask) -> None:
    with core.init() as context:
        context.train.report_validation_metrics(1, {"loss": 1.0})
    with task.metrics_file.open("a") as file:
        file.write('{"group": "valid\n')  # of a full disk
    with core.init() as context, pytest.raises(ValueError, match="'loss' had a value after 1 steps"):
        context.train.report_validation_metrics(1, {"loss": 0.5})
    dataclasses.replace(task, run_id=2).write()
    with core.init() as context:
        context.train.report_validation_metrics(1, {"loss": 0.5})
        with pytest.raises(ValueError, match="'loss' had a value after 1 steps"):
            context.train.report_validation_metrics(1, {"loss": 0.5})


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize("progress", [-0.1, 1.5, "half", float("nan"), None])
def test_progress_that_is_no_fraction_is_named(progress: Any) -> None:
    with core.init() as context, pytest.raises(ValueError, match="Progress must be a number from 0 to 1; got"):
        context.train.report_progress(progress)


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize(
    ("group", "steps", "status"),
    [("training", 1, 0), ("training", 2, -signal.SIGTERM), ("validation", 2, -signal.SIGTERM)],
)
def test_a_stopped_script_that_never_asks_ends_at_a_later_step(group: str, steps: int, status: int) -> None:
    def run(rank: int) -> None:
        with core.init() as context:
            context.train.report_validation_metrics(1, {"loss": 0.5})
            os.kill(os.getpid(), signal.SIGTERM)
            context.train.report_metrics(group, steps, {"loss": 0.5})

    assert ends_of(start_forked(1, run), 60) == [status]


@pytest.mark.usefixtures("task")
def test_a_stopped_script_may_ask_after_the_signal() -> None:
    with core.init() as context:
        os.kill(os.getpid(), signal.SIGTERM)
        assert context.preempt.should_preempt()
        context.train.report_validation_metrics(1, {"loss": 0.5})


def test_there_is_no_cluster_info_outside_of_experiments() -> None:
    assert det_lightning.get_cluster_info() is None


@pytest.mark.usefixtures("task")
def test_cluster_info_has_the_facts_of_the_trial() -> None:
    info = det_lightning.get_cluster_info()
    assert info is not None
    assert (info.trial.trial_id, info.trial.experiment_id, info.trial.trial_seed) == (2, 3, 42)
    assert info.trial.hparams == {"lr": 0.1}
    assert (info.latest_checkpoint, info.user_data, info.slot_ids) == ("some-id", {"url": "here"}, [0])
    assert (info.task_type, info.task_id, info.allocation_id) == ("TRIAL", "3.2", "3.2.1")
    assert (info.container_addrs, info.container_rank, info.container_slot_counts) == (["127.0.0.1"], 0, [1])


def test_a_report_is_a_line_of_json(task: TrialTask) -> None:
    task.report("validation", 5, {"loss": float("nan"), "size": 1})
    (line,) = task.metrics_file.read_text().splitlines()
    assert '"metrics": {"loss": "NaN", "size": 1}' in line


def test_unreportable_metric_is_named(task: TrialTask, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        task.report("training", 5, {"loss": np.float32(0.5), "raw": b"x"})
    assert ['"metrics": {"loss": 0.5}' in line for line in task.metrics_file.read_text().splitlines()] == [True, True]
    assert caplog.text.count("training metrics['raw'] is a bytes") == 1


# TensorBoard files, read back as TensorBoard reads them


Scalars = list[tuple[str, float, int]]
SCALARS: Scalars = [("Determined/loss", 1.5, 1), ("Determined/loss", 0.5, 2), ("Determined/val_loss", 2.5, 2)]


def read(directory: Path) -> Scalars:
    """Return the scalars of all files in ``directory``, by tag and then in the order in which they were written."""
    found: Scalars = []
    for file in sorted(directory.glob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        found += [(tag, e.value, e.step) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    return found


@settings(max_examples=10)
@given(st.lists(st.tuples(st.text("ab/_", min_size=1), st.floats(width=32, allow_nan=False), st.integers(0, 2**40))))
def test_any_scalars_come_back(tmp_path_factory: pytest.TempPathFactory, scalars: Scalars) -> None:
    directory = tmp_path_factory.mktemp("events")
    EventFile(directory).write(scalars)
    assert sorted(read(directory)) == sorted(scalars)


def test_first_write_makes_the_file() -> None:
    output = TensorBoardOutput(enabled=True, locate=default_directory)
    output.add_scalars([])
    assert not Path("runs").exists()
    output.add_scalars(SCALARS[:1])
    assert read(output.path) == SCALARS[:1], "what is written can be read at once"
    output.add_scalars(SCALARS[1:])
    assert output.path.parent == Path("runs")
    assert len(list(output.path.iterdir())) == 1
    assert read(output.path) == SCALARS


def test_requested_writer_takes_over() -> None:
    output = TensorBoardOutput(enabled=True, locate=default_directory)
    output.add_scalars(SCALARS[:1])
    writer = output.writer
    assert isinstance(writer, SummaryWriter)
    assert output.writer is writer
    writer.add_scalar("by the user", 3.0, 7)
    output.add_scalars(SCALARS[1:])
    assert sorted(read(output.path)) == sorted([*SCALARS, ("by the user", 3.0, 7)])
    # TensorBoard follows only the latest file of a directory, so later values go where the user's go.
    assert len(list(output.path.iterdir())) == 2
    writer.close()


def test_only_single_numbers_are_for_loggers() -> None:
    numbers = {"float": 1.5, "int": 2, "numpy": np.float32(3), "array": np.array(4)}
    others = {"left_out": 5, "vector": np.ones(2), "word": "six", "none": None, "array of a word": np.array("seven")}
    assert select_scalars({**numbers, **others}, leave_out=["left_out"]) == numbers
