"""The files of an experiment: its log, its copy of the code, its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning import errors
from det_lightning.experiments.directory import ExperimentDirectory, find_experiments
from det_lightning.experiments.event_log import EventLog, read_events
from det_lightning.experiments.model_context import MOST_BYTES, copy_model_context
from det_lightning.experiments.report import write_report
from det_lightning.experiments.trial_process import RecordReader
from tests.experiments.made_experiments import NAME, made_experiment


def test_a_line_that_a_killed_process_left_incomplete_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    log = EventLog(file)
    log.append({"type": "first"})
    log.close()
    with file.open("ab") as torn:
        torn.write(b'{"type": "sec')
    log = EventLog(file)
    log.append({"type": "third"})
    log.close()
    assert [event["type"] for event in read_events(file)] == ["first", "third"]


def test_a_log_is_open_in_one_place_at_a_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(errors.ExperimentInUse, match="is run by another process"):
        EventLog(tmp_path / "events.jsonl")
    log.close()
    EventLog(tmp_path / "events.jsonl").close()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"type": "first"}\nrubbish\n{"type": "third"}\n')
    with pytest.raises(errors.DamagedExperiment, match=r"Line 2 of .*events\.jsonl"):
        read_events(file)


def test_records_are_read_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    reader = RecordReader(file)
    assert reader.new_records() == []
    file.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert reader.new_records() == [(1, {"a": 1}), (2, {"a": 2})]
    with file.open("a") as rest:
        rest.write(": 3}\n")
    assert reader.new_records() == [(3, {"a": 3})]
    assert RecordReader(file, lines_read=2).new_records() == [(3, {"a": 3})]


def test_the_code_is_copied_without_what_detignore_names_and_without_experiments(tmp_path: Path) -> None:
    source = tmp_path / "source"
    experiment = [f"experiments/first-1/{name}" for name in ("events.jsonl", "config.json", "code/model.py")]
    files = ("model.py", "data/images.bin", "package/module.py", "package/__pycache__/module.pyc", ".git/HEAD")
    for name in (*files, *experiment):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / ".detignore").write_text("data/\n")
    (source / "loop").symlink_to(source)
    copy_model_context(source, tmp_path / "copy")
    copied = sorted(path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.py"))
    assert copied == ["model.py", "package/module.py"]
    assert not (tmp_path / "copy" / "data").exists()


def test_more_code_than_determined_accepts_is_refused_with_the_largest_files(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with (tmp_path / "source" / "weights.bin").open("wb") as large:
        large.truncate(MOST_BYTES + 1)
    with pytest.raises(errors.ExperimentError, match=r"weights\.bin \(95\.0 MiB\)"):
        copy_model_context(tmp_path / "source", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentDirectory:
    return made_experiment(tmp_path)


def test_experiments_are_found_by_number(experiment: ExperimentDirectory) -> None:
    assert experiment.path.name == "a-search-1"
    second = ExperimentDirectory.create(experiment.path.parent, NAME)
    second.events.touch()
    assert [found.experiment_id for found in find_experiments(experiment.path.parent)] == [1, 2]


@pytest.mark.slow
def test_the_page_has_all_charts_and_needs_no_network(experiment: ExperimentDirectory, tmp_path: Path) -> None:
    write_report(experiment, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for heading in ("Learning curves", "Parallel coordinates", "Hyperparameters and metric", "Pairs of", "Trials"):
        assert f"<h2>{heading}" in page
    assert "<h1>a &lt;search&gt; (COMPLETED)</h1>" in page
    assert "<script src" not in page
    assert "hidden" not in page.partition("<h2>Trials")[2]


@pytest.mark.slow
@pytest.mark.parametrize("trials", [0, 1, 3])
def test_a_trial_that_has_diverged_is_in_the_table_of_the_page_only(trials: int, tmp_path: Path) -> None:
    directory = made_experiment(tmp_path, trials)
    diverged = trials + 1
    log = EventLog(directory.events)
    log.append({"type": "trial_created", "time": 4.0, "trial": diverged, "seed": 1, "hparams": {"lr": 1.0}})
    at = {"time": 5.0, "trial": diverged, "lines": 1, "steps_completed": 10}
    log.append({"type": "validation", **at, "metrics": {"loss": "Infinity"}})
    log.close()
    write_report(directory, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    charts, _, table = page.rpartition("<h2>Trials")
    assert f"Trial {diverged}" not in charts
    assert ("<h2>Learning curves" in charts) == (trials > 0)
    assert '<td class="number">inf</td>' in table
