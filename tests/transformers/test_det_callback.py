"""``DetCallback`` with a ``transformers.Trainer``, without an experiment, and what it refuses in one."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; run tox -e transformers")

import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import det_lightning as det
from det_lightning.core._task import TASK_VARIABLE, TrialTask
from det_lightning.transformers import DetCallback
from tests.transformers.tiny_training import make_trainer

pytestmark = pytest.mark.slow


class Log(transformers.TrainerCallback):
    """Keeps what the Trainer logs, as callbacks after DetCallback see it."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.names.append(set(logs))


def arguments(**given: Any) -> transformers.TrainingArguments:
    fixed = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4}
    return transformers.TrainingArguments("output", **{**fixed, "max_steps": 4, "logging_steps": 2, **given})


@pytest.fixture
def core_context() -> Iterator[Any]:
    with det.core.init(checkpoint_storage="checkpoints") as context:
        yield context


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialTask:
    """The process belongs to a trial of an experiment; tests change its searcher before they write it."""
    task = TrialTask(
        directory=tmp_path,
        experiment_id=1,
        trial_id=3,
        run_id=1,
        trial_seed=7,
        hparams={},
        config={"searcher": {"name": "single", "metric": "eval_loss", "smaller_is_better": True}},
        slots=[0],
        checkpoint_storage=str(tmp_path / "checkpoints"),
    )
    task.write()
    monkeypatch.setenv(TASK_VARIABLE, str(task.file))
    return task


def records_of(task: TrialTask, group: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in task.metrics_file.read_text().splitlines()]
    return [record["metrics"] for record in records if record["group"] == group]


def test_without_an_experiment_metrics_and_checkpoints_are_kept(core_context: Any) -> None:
    args = arguments(save_steps=2)
    make_trainer(args, DetCallback(core_context, args, user_data={"task": "first token"})).train()
    events = EventAccumulator(str(core_context.train.get_tensorboard_path())).Reload()
    written = {(event.step, tag) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert {(2, "Determined/loss"), (4, "Determined/loss"), (4, "Determined/val_eval_accuracy")} <= written
    assert {step for step, tag in written if "eval" in tag} == {4}  # one evaluation, at the end
    found = {
        json.loads(path.read_text())["steps_completed"]: path.parent for path in Path().glob("checkpoints/*/*.json")
    }
    assert sorted(found) == [2, 4]
    assert {path.name for path in found[4].iterdir()} == {"checkpoint-4", "metadata.json"}
    assert json.loads((found[4] / "checkpoint-4" / "my_data.json").read_text()) == {"task": "first token"}


def test_filters_keep_the_searchs_metrics(task: TrialTask) -> None:
    chosen = ["accuracy"]
    with det.core.init() as core_context:
        args = arguments()
        log = Log()
        make_trainer(args, DetCallback(core_context, args, filter_metrics=chosen), log).train()
    (validation,) = records_of(task, "validation")
    assert set(validation) == {"eval_accuracy", "eval_loss", "batches", "epochs"}
    assert validation["epochs"] == 0.25
    assert {frozenset(metrics) for metrics in records_of(task, "training")} == {frozenset({"batches", "epochs"})}
    assert chosen == ["accuracy"]
    assert any("epoch" in names and "eval_runtime" in names and "batches" not in names for names in log.names)


def test_end_saves_a_checkpoint_and_reports_progress(task: TrialTask) -> None:
    with det.core.init() as core_context:
        args = arguments(max_steps=-1, num_train_epochs=0.2)
        make_trainer(args, DetCallback(core_context, args)).train()
    (checkpoint,) = (task.directory / "checkpoints").glob("*/metadata.json")
    metadata = json.loads(checkpoint.read_text())
    assert (metadata["steps_completed"], metadata["trial_id"]) == (4, 3)
    # A fifth of 16 batches is 4, which is more than a fifth of an epoch.
    assert [record["progress"] for record in records_of(task, "progress")] == [1.0]


@pytest.mark.parametrize(
    ("searcher", "given", "message"),
    [
        ({"max_length": {"batches": 9}}, {}, r"max_length is \{'batches': 9\}, and --max_steps 4 makes .* 4 batches"),
        (
            {"max_length": {"batches": 4}},
            {"max_steps": -1, "num_train_epochs": 4},
            r"max_length is \{'batches': 4\}, and --num_train_epochs 4 makes the trainer train 4 epochs",
        ),
        ({"max_length": 4}, {}, "max_length is 4, without a unit"),
        ({"time_metric": "batches", "max_time": 9}, {}, "max_time is 9 with searcher.time_metric: batches"),
        ({"time_metric": "epochs", "max_time": 4}, {}, "max_time is 4 with searcher.time_metric: epochs"),
    ],
)
def test_lengths_must_agree(task: TrialTask, searcher: dict[str, Any], given: dict[str, Any], message: str) -> None:
    task.config["searcher"].update(searcher)
    task.write()
    with det.core.init() as core_context, pytest.raises(ValueError, match=message):
        DetCallback(core_context, arguments(**given))


@pytest.mark.parametrize(
    ("searcher", "given"),
    [
        ({}, {}),
        ({"max_length": {"batches": 4}}, {}),
        ({"max_length": {"epochs": 3}}, {"max_steps": -1, "num_train_epochs": 3}),
        ({"time_metric": "batches", "max_time": 4}, {}),
        ({"time_metric": "tokens", "max_time": 1000}, {}),
    ],
)
def test_length_of_a_search_that_agrees_is_accepted(
    task: TrialTask, searcher: dict[str, Any], given: dict[str, Any]
) -> None:
    task.config["searcher"].update(searcher)
    task.write()
    with det.core.init() as core_context:
        callback = DetCallback(core_context, arguments(**given))
    assert (callback.searcher_metric, callback.time_metric) == ("eval_loss", searcher.get("time_metric"))


def test_missing_metrics_are_named(task: TrialTask) -> None:
    searcher = {"name": "async_halving", "metric": "eval_f1", "time_metric": "tokens", "max_time": 9}
    task.config["searcher"].update(searcher)
    task.write()
    with det.core.init() as core_context:
        args = arguments()
        trainer = make_trainer(args, DetCallback(core_context, args))
        missing = r"searcher\.metric: eval_f1, searcher\.time_metric: tokens\. The evaluation has .*eval_loss"
        with pytest.raises(ValueError, match=missing):
            trainer.train()


def test_a_shared_directory_is_warned_of(task: TrialTask, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task.config["searcher"].update(name="random", max_trials=2)
    task.write()
    with det.core.init() as core_context, caplog.at_level(logging.WARNING):
        DetCallback(core_context, arguments())
        assert not caplog.messages
        args = arguments()
        args.output_dir = str(tmp_path / "shared")
        DetCallback(core_context, args)
    assert any("overwrite each other's checkpoints" in message for message in caplog.messages)


def test_an_ignored_checkpoint_is_warned_of(task: TrialTask, caplog: pytest.LogCaptureFixture) -> None:
    with det.core.init() as core_context:
        args = arguments(max_steps=2)
        make_trainer(args, DetCallback(core_context, args)).train()
    (metadata,) = (task.directory / "checkpoints").glob("*/metadata.json")
    Path("output/checkpoint-99").mkdir()  # of another run
    dataclasses.replace(task, run_id=2, latest_checkpoint=metadata.parent.name).write()
    with det.core.init() as core_context:
        args = arguments()
        callback = DetCallback(core_context, args)
        assert args.resume_from_checkpoint == str(Path("output", "checkpoint-2"))
        with caplog.at_level(logging.WARNING):
            make_trainer(args, callback).train()
    assert any("resume_from_checkpoint=args.resume_from_checkpoint" in message for message in caplog.messages)
