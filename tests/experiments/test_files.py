"""The files of an experiment: its log, its copy of the code, its page."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.checkpoint.format.code_copy import MOST_BYTES
from det_lightning.core._task import TrialTask
from det_lightning.experiments.checkpoint_lookup import CheckpointLookup
from det_lightning.experiments.directory import ExperimentDirectory, find_experiments
from det_lightning.experiments.event_log import EventLog, find_runner, read_events
from det_lightning.experiments.lifecycle import delete_checkpoints
from det_lightning.experiments.model_context import copy_model_context
from det_lightning.experiments.overview import describe_experiment, read_state, summarize_experiment
from det_lightning.experiments.report import write_report
from det_lightning.experiments.trial_process import RecordReader
from det_lightning.masking import MASK
from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.experiments.made_experiments import NAME, change_config, made_experiment, make_details
from tests.experiments.running import run, run_project, write_project


@pytest.fixture
def directory(tmp_path: Path) -> ExperimentDirectory:
    """A finished experiment of three trials."""
    return made_experiment(tmp_path)


def test_log_has_one_writer_and_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    log = EventLog(file)
    log.append({"type": "first"})
    with pytest.raises(errors.ExperimentInUse, match="is run by another process"):
        EventLog(file)
    log.close()
    with file.open("ab") as torn:
        torn.write(b'{"type": "sec')
    log = EventLog(file)
    log.append({"type": "third"})
    log.close()
    assert [event["type"] for event in read_events(file)] == ["first", "third"]


@pytest.mark.slow
def test_logs_are_printed_escaped(directory: ExperimentDirectory) -> None:
    directory.trial(1).mkdir(parents=True)
    (directory.trial(1) / "log.txt").write_text("token: hello\n\x1b[31mred\n")
    assert run("experiment", "logs", directory.path, 1).stdout == "token: hello\n\\x1b[31mred\n"


REPORT: dict[str, Any] = {"group": "validation", "steps_completed": 2, "metrics": {"loss": 0.5}, "time": 1.0}
CREATED = {"type": "trial_created", "trial": 1, "seed": 1, "hparams": {}}


@pytest.mark.parametrize(
    ("event", "named"),
    [
        ({"type": "run_started", "trial": 2, "run": 1, "time": 0.0}, "trial"),
        ({"type": "validation", "trial": 1, "steps_completed": "x", "metrics": {}}, "steps_completed"),
        ({"type": "checkpoint", "trial": 1, "steps_completed": 1, "checkpoint_id": 5, "time": 0.0}, "checkpoint_id"),
        ({"type": "trial_created", "trial": 1, "seed": 1}, "hparams"),
        ({"type": "run_ended", "trial": 1, "failed": False, "paused": False, "closed": "x", "time": 0.0}, "closed"),
        ({"type": "message"}, "text"),
    ],
    ids=str,
)
def test_incomplete_event_is_named(event: dict[str, Any], named: str, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(f"{json.dumps(CREATED)}\n{json.dumps(event)}\n")
    with pytest.raises(errors.DamagedExperiment, match=rf"Line 2 of .*events\.jsonl has no usable '{named}'"):
        read_events(file)


@pytest.mark.parametrize("line", ["no", "[" * 100_000, '{"type": "x", "a": ' + "[" * 500 + "]" * 500 + "}"], ids=len)
def test_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(f'{{"type": "first"}}\n{line}\n{{"type": "third"}}\n')
    with pytest.raises(errors.DamagedExperiment, match=r"Line 2 of .*events\.jsonl is not an event"):
        read_events(tmp_path / "events.jsonl")


@pytest.mark.parametrize(
    "content", ["{", "[1]", "[" * 100_000, '{"name": "a"}', '{"name": "a", "searcher": {"metric": ["loss"]}}'], ids=len
)
def test_configuration_that_is_none_is_named(content: str, directory: ExperimentDirectory) -> None:
    directory.config_file.write_text(content)
    for read in (summarize_experiment, describe_experiment):
        with pytest.raises(errors.DamagedExperiment, match=r"config\.json is not"):
            read(directory)


def test_damaged_runner_file_names_nobody(tmp_path: Path) -> None:
    """``experiment stop`` signals it; 0 and negative numbers stand for several."""
    file = tmp_path / "events.jsonl"
    log = EventLog(file)
    assert find_runner(file) == (os.getpid(), platform.node(), True)
    for content in ("0 here", "-1 here", "x here", "5", "9" * 5000 + " here"):
        (tmp_path / "runner.pid").write_text(content)
        assert find_runner(file) is None
    log.close()


def test_log_without_usable_values_is_shown(directory: ExperimentDirectory) -> None:
    log = EventLog(directory.events)
    log.append({"type": "validation", "time": 5.0, "trial": 1, "steps_completed": 30, "metrics": {"loss": 10**400}})
    log.close()
    assert describe_experiment(directory)["trials"][0]["latest"] is None
    directory.events.write_text('{"type": "message", "text": "no time"}\n')
    assert summarize_experiment(directory)["started"] is None


def test_records_are_read_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    reader = RecordReader(file)
    assert reader.new_records() == []
    records = [{**REPORT, "steps_completed": steps} for steps in (1, 2, 3)]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    file.write_text(lines[:-20])
    assert reader.new_records() == [(1, records[0]), (2, records[1])]
    file.write_text(lines)
    assert reader.new_records() == [(3, records[2])]
    assert RecordReader(file, lines_read=2).new_records() == [(3, records[2])]


def test_cut_record_spoils_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = TrialTask(tmp_path, 1, 1, 1, 0, hparams={}, config={}, slots=[0], checkpoint_storage=str(tmp_path))
    task.report("training", 1, {"loss": 1})
    with task.metrics_file.open("ab") as cut_off:
        cut_off.write(b'{"group": "vali')
    task.report("training", 2, {"loss": 2})
    reader = RecordReader(task.metrics_file)
    assert [(number, record["steps_completed"]) for number, record in reader.new_records()] == [(1, 1), (3, 2)]
    reason = "it is not JSON; perhaps a full disk cut it off"
    assert caplog.messages == [f"Line 2 of {task.metrics_file} is left out: {reason}."]
    task.report("training", 3, {"loss": 3})
    assert [number for number, _ in reader.new_records()] == [4]


NO_REPORTS = [
    "3",
    "{}",
    "NaN",
    "[" * 100_000,
    '{"a": ' + "9" * 5000 + "}",
]
CHANGES: list[dict[str, Any]] = [
    {"group": 3},
    {"steps_completed": 10**400},
    {"steps_completed": -1},
    {"metrics": {"a": json.loads("[" * 500 + "]" * 500)}},
    {"time": "now"},
    {"group": "checkpoint", "metrics": {"checkpoint_id": 5}},
]
NO_REPORTS += [json.dumps({**REPORT, **change}) for change in CHANGES]


@pytest.mark.parametrize("line", NO_REPORTS, ids=lambda line: line[:70])
def test_line_without_a_report_is_left_out(
    line: str, directory: ExperimentDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    """A running trial's own processes may write anything to its file."""
    log = EventLog(directory.events)
    log.append({**CREATED, "time": 3.0, "trial": 4})
    log.append({"type": "run_started", "trial": 4, "run": 1, "time": 3.0})
    log.close()
    file = directory.trial(4) / "metrics.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(f"{line}\n{json.dumps(REPORT)}\n")
    assert describe_experiment(directory, with_curves=True)["trials"][3]["curves"] == {"loss": [(2, 0.5)]}
    (message,) = caplog.messages
    assert message.startswith(f"Line 1 of {file} is left out: it is no")


def test_commands_show_hyperparameters_and_no_secrets(directory: ExperimentDirectory, tmp_path: Path) -> None:
    assert [trial["hparams"]["password"] for trial in describe_experiment(directory)["trials"]] == ["hidden"] * 3
    config = write_project(tmp_path / "project", hyperparameters={"api_key": "hidden"})
    (planned,) = json.loads(run("run", config, "--dry-run").stdout)["trials"]
    assert planned["hparams"] == {"api_key": "hidden"}
    directory = change_config(directory, environment={"environment_variables": ["LOGIN=hunter2-4711"]})
    ended = {"type": "run_ended", "trial": 1, "time": 5.0, "failed": True, "paused": False, "closed": "ERROR"}
    events = [{**ended, "reason": "wrong: hunter2-4711"}, {"type": "message", "text": "https://me:hunter2@host"}]
    with directory.events.open("a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)
    shown = describe_experiment(directory)
    assert (shown["trials"][0]["reason"], shown["messages"]) == (f"wrong: {MASK}", [f"https://me:{MASK}@host"])


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("[" * 100_000, "is not JSON"),
        ("[]", "these are wrong: all"),
        ("{}", "'loggers'"),
        ('{"loggers": [], "source_checkpoint": 3, "slots": 0}', "'source_checkpoint', 'slots'"),
        ('{"loggers": [], "trusted": 1}', "'trusted'"),
    ],
)
def test_damaged_options_are_named(content: str, wrong: str, directory: ExperimentDirectory) -> None:
    directory.options_file.write_text(content)
    with pytest.raises(errors.DamagedExperiment, match=rf"options\.json .*{wrong}"):
        directory.options()


@pytest.mark.parametrize(
    ("options", "source"),
    [
        (None, "abc"),  # as earlier releases left it
        ({"loggers": []}, "abc"),
        ({"loggers": [], "source_checkpoint": "/first-1/checkpoints/abc"}, "/first-1/checkpoints/abc"),
    ],
)
def test_source_checkpoint_stays_the_same(options: Any, source: str, directory: ExperimentDirectory) -> None:
    searcher = {"metric": "loss", "smaller_is_better": True, "source_checkpoint_uuid": "abc"}
    directory = change_config(directory, searcher=searcher)
    if options is not None:
        directory.options_file.write_text(json.dumps(options))
    assert directory.options().source_checkpoint == source


@pytest.mark.parametrize("name", ["config.json", "options.json"])
def test_huge_files_are_not_read(name: str, directory: ExperimentDirectory) -> None:
    with (directory.path / name).open("ab") as file:
        file.truncate(2**40)  # without taking room on the disk
    with pytest.raises(errors.DamagedExperiment, match=rf"{name}.* 1,099,511,627,776 bytes"):
        [describe_experiment(directory), directory.options()]


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from det_lightning.experiments.event_log import find_runner
if os.getuid() == 0:  # who may do anything
    os.setuid(65534)
print(find_runner(Path(sys.argv[1])))
"""


def test_read_only_experiment_is_shown() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "events.jsonl")
        file.write_text("")
        file.chmod(0o444)
        Path(folder).chmod(0o755)
        command = [sys.executable, "-c", AS_ANOTHER_USER, str(file)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "None\n"


# Checkpoints of an experiment that has ended


def test_deletion_goes_on_after_a_kill(directory: ExperimentDirectory) -> None:
    """Of three checkpoints only the last is to be kept. A killed cleanup, of which no event tells, goes on."""
    rule = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 1}
    directory = change_config(directory, checkpoint_storage=rule)
    shutil.rmtree(directory.checkpoints)
    first, second, last, deleted = (write_checkpoint(directory.checkpoints, steps).name for steps in (1, 2, 3, 4))
    events: list[dict[str, Any]] = [{**CREATED, "time": 1.0}]
    for steps, checkpoint_id in enumerate((first, second, last, deleted), start=1):
        at = {"time": float(steps), "trial": 1, "steps_completed": steps}
        events.append({"type": "checkpoint", **at, "checkpoint_id": checkpoint_id})
    directory.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    shutil.rmtree(directory.checkpoints / deleted)  # by hand: it takes the place of no other
    storage = CheckpointStorage(directory.checkpoints)
    lookup = CheckpointLookup(str(directory.checkpoints))
    assert [*delete_checkpoints(directory, read_state(directory), lookup)] == [(1, first), (1, second), (1, deleted)]
    assert storage.list_ids() == [last]
    shutil.rmtree(directory.checkpoints)  # as where a disk is not mounted
    with pytest.raises(errors.StorageError, match="has none of the 4 checkpoints, so nothing was deleted"):
        [*delete_checkpoints(directory, read_state(directory), lookup)]


@pytest.mark.parametrize("path", ["saved/here", "/saved/here"])
def test_relative_storage_is_in_the_experiment(path: str, directory: ExperimentDirectory) -> None:
    named = {"type": "directory", "container_path": path, "save_trial_best": 1}
    directory = change_config(directory, checkpoint_storage=named)
    in_trials = directory.path / path  # which is the path itself if that is absolute
    assert directory.checkpoint_storage() == {"type": "directory", "container_path": str(in_trials)}


def test_code_is_copied_without_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    files = ["model.py", "data/images.bin", "package/module.py", "package/__pycache__/module.pyc", ".git/HEAD"]
    files += [f"experiments/first-1/{name}" for name in ("events.jsonl", "config.json", "code/model.py")]
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / ".detignore").write_text("data/\n")
    (source / "loop").symlink_to(source)
    copy_model_context(source, tmp_path / "copy")
    copied = sorted(path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.py"))
    assert copied == ["model.py", "package/module.py"]
    assert not (tmp_path / "copy" / "data").exists()
    with (source / "weights.bin").open("wb") as large:
        large.truncate(MOST_BYTES + 1)
    with pytest.raises(errors.ExperimentError, match=r"weights\.bin \(95\.0 MiB\)"):
        copy_model_context(source, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_experiments_are_found_by_number(tmp_path: Path) -> None:
    assert made_experiment(tmp_path).path.name == "a-search-1"
    ExperimentDirectory.create(tmp_path, NAME).events.touch()
    assert [found.experiment_id for found in find_experiments(tmp_path)] == [1, 2]


def write_page(directory: ExperimentDirectory) -> str:
    write_report(describe_experiment(directory, with_curves=True), directory.path / "page.html")
    return (directory.path / "page.html").read_text()


def test_page_needs_no_network(tmp_path: Path) -> None:
    page = write_page(made_experiment(tmp_path))
    for heading in ("Learning curves", "Hyperparameters and metric", "Parallel coordinates", "Trials"):
        assert f"<h2>{heading}</h2>" in page
    assert "<h1>a &lt;search&gt;</h1>" in page
    assert "<script src" not in page


def test_page_keeps_exact_values(tmp_path: Path) -> None:
    losses = [(batch, 1.0) for batch in range(2500)]
    losses[1001] = (1001, 0.0)
    write_report(make_details(losses, [(1002, 3.0)]), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    (trial,) = json.loads(page.partition("const data = ")[2].partition(";\n")[0])["trials"]
    assert len(trial["curves"]["loss"][0]) <= 1001
    assert trial["values"] == {"loss": 0.0}
    assert "<dt>best</dt><dd>0</dd>" in page
    assert "<title>a-run</title>" in page


@pytest.mark.parametrize("value", [-1.0, 0, 10**400, float("inf"), "</script><script>alert(1)</script>"], ids=str)
def test_page_takes_any_hyperparameter(value: Any, directory: ExperimentDirectory) -> None:
    directory.events.write_text(directory.events.read_text().replace('"lr":0.1', f'"lr":{json.dumps(value)}', 1))
    assert "<script>alert" not in write_page(directory)


def test_undecodable_text_is_shown_escaped(directory: ExperimentDirectory) -> None:
    content = directory.events.read_text()
    directory.events.write_text(content.replace('"lr":0.1', r'"lr":"/data/\udcff"', 1).replace('"loss"', r'"l\ud800"'))
    page = write_page(directory)
    assert r"/data/\udcff" in page
    assert r'"/data/\\udcff"' in page.partition("const data = ")[2].partition("\n")[0]
    assert r"/data/\udcff" in run("experiment", "show", directory.path).stdout
    shown = json.loads(run("experiment", "show", directory.path, "--json").stdout)
    assert r"/data/\udcff" in [trial["hparams"]["lr"] for trial in shown["trials"]]


@pytest.mark.parametrize("trials", [0, 3])
def test_page_shows_diverged_trials(trials: int, tmp_path: Path) -> None:
    directory = made_experiment(tmp_path, trials)
    diverged = trials + 1
    log = EventLog(directory.events)
    log.append({**CREATED, "time": 4.0, "trial": diverged, "hparams": {"lr": 1.0}})
    at = {"time": 5.0, "trial": diverged, "lines": 1, "steps_completed": 10}
    log.append({"type": "validation", **at, "metrics": {"loss": "Infinity"}})
    log.close()
    assert '<td class="number" data-value="inf">inf</td>' in write_page(directory)


def modes_of(experiment: Path) -> dict[str, str]:
    files = [path for path in (*experiment.glob("*"), *experiment.glob("trials/*/task.json")) if path.is_file()]
    return {path.relative_to(experiment).as_posix(): f"{path.stat().st_mode & 0o777:o}" for path in files}


def test_files_with_settings_are_private(tmp_path: Path) -> None:
    experiment = run_project(tmp_path, hyperparameters={"api_key": "hidden"})
    names = ("config.json", "events.jsonl", "experiment.yaml", "options.json", "trials/1/task.json")
    private = dict.fromkeys(names, "600")
    assert modes_of(experiment) == private
    for name in private:
        (experiment / name).chmod(0o644)
    run("experiment", "resume", experiment)
    assert modes_of(experiment) == private
