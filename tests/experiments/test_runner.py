"""The runner of an experiment, with real processes."""

from __future__ import annotations

from pathlib import Path

from det_lightning.config import read_config
from det_lightning.experiments import lifecycle
from det_lightning.experiments.directory import Options
from det_lightning.experiments.event_log import EventLog
from det_lightning.experiments.launcher import Demand, Record
from det_lightning.experiments.local import LocalLauncher
from det_lightning.experiments.runner import ExperimentRunner
from det_lightning.experiments.search.search import Search
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import TrialProcess
from tests.experiments.running import events_of, pids_of, write_project


def test_starting_trial_is_paused(tmp_path: Path) -> None:
    config = read_config(write_project(tmp_path / "project", hyperparameters={"waits_at": [1]}))
    directory = lifecycle.create(config, None, tmp_path / "project", tmp_path, Options(loggers=[]))

    class InterruptedLauncher(LocalLauncher):
        def start(self, trial: TrialRecord, state: ExperimentState, record: Record) -> TrialProcess:
            runner.pause()  # as a handler of signals does
            return super().start(trial, state, record)

    launcher = InterruptedLauncher(directory, config.as_dict(), directory.options(), Demand(1, max_slots=1))
    log = EventLog(directory.events)
    search = Search(config.searcher, config.hyperparameters, 7)
    runner = ExperimentRunner(log, search, ExperimentState("loss", True), launcher, 0, lambda _: None)
    assert runner.run() is None
    log.close()
    assert [event["paused"] for event in events_of(directory.path, "run_ended")] == [True]
    assert pids_of(directory.path) == []
