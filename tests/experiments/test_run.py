"""``det-lightning run`` and ``experiment``: whole experiments, with real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from det_lightning.config import read_config
from det_lightning.errors import ExperimentError
from det_lightning.experiments import lifecycle
from det_lightning.experiments.directory import Options
from det_lightning.experiments.event_log import EventLog
from det_lightning.experiments.launcher import Demand, Record
from det_lightning.experiments.local import LocalLauncher
from det_lightning.experiments.runner import ExperimentRunner
from det_lightning.experiments.search.search import Search
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import TrialProcess
from det_lightning.experiments.warm_start import find_source
from tests.experiments.running import events_of, pids_of, run, run_project, run_until, start, wait_for, write_project

pytestmark = pytest.mark.slow

RATES = {"type": "double", "minval": 0.1, "maxval": 1.0}


def test_random_search_runs_all_its_trials(tmp_path: Path) -> None:
    config = write_project(
        tmp_path / "project",
        hyperparameters={"lr": RATES, "spawns": True},
        searcher={"name": "random", "metric": "loss", "max_trials": 3, "max_concurrent_trials": 2},
    )
    planned = json.loads(run("run", config, "--dry-run").stdout)["trials"]
    run("run", config, tmp_path / "project", "--experiments", tmp_path / "experiments")
    experiment = tmp_path / "experiments" / "small-1"
    created = [
        {"id": event["trial"], "trial_seed": event["seed"], "hparams": event["hparams"]}
        for event in events_of(experiment, "trial_created")
    ]
    assert created == planned
    shown = json.loads(run("experiment", "show", experiment, "--json").stdout)
    assert [(trial["state"], trial["batches"]) for trial in shown["trials"]] == [("COMPLETED", 5)] * 3
    assert pids_of(experiment) == []  # what a trial leaves running is ended


def test_paths_may_be_relative(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project").parent
    run("run", "config.yaml", cwd=project)
    experiment = Path("experiments") / "small-1"
    assert run("experiment", "show", experiment, cwd=project).stdout.count("COMPLETED") == 2
    assert len(events_of(project / experiment, "validation")) == 5


def test_stopped_trials_are_complete(tmp_path: Path) -> None:
    experiment = run_project(
        tmp_path,
        hyperparameters={"lr": RATES, "steps": 16},
        searcher={
            "name": "async_halving", "metric": "loss", "max_trials": 6, "num_rungs": 2, "divisor": 4,
            "max_time": 16, "time_metric": "batches", "max_concurrent_trials": 2,
        },
    )  # fmt: skip
    assert {event["closed"] for event in events_of(experiment, "run_ended")} == {"COMPLETED"}
    assert len(events_of(experiment, "trial_created")) == 6
    assert events_of(experiment, "stop_requested")


CLAIMS_PREEMPTION = ["python3", "-c", "from trial_script import report; report('preempted', None, {})"]
POLICY = {"name": "broken", "pattern": "[A-Z]{4} is broken$", "action": {"type": "cancel_retries"}}
HOOK_ENDED = "ended the run before the entrypoint began"
NOT_SAVED = "like a preempted run, but had saved nothing"


@pytest.mark.parametrize(
    ("entrypoint", "restarts", "runs", "hook", "reason"),
    [
        ("exit 3", 2, 3, "", "it ended with status 3, after 2 restarts"),
        ("exit 75", 2, 3, "", f"it ended with status 75, {NOT_SAVED}, after 2 restarts"),
        (CLAIMS_PREEMPTION, 2, 3, "", f"it ended with status 0, {NOT_SAVED}, after 2 restarts"),
        ("echo CUDA is broken; exit 4", 5, 1, "", "the log policy broken cancels retries"),
        ("touch trained", 0, 1, "false\ntouch hooked\n", f"line 1 (false), {HOOK_ENDED}, after 0 restarts"),
        ("touch trained", 0, 1, "f() {\n exec true\n}\nf\n", f"line 2 (exec true), {HOOK_ENDED}, after 0 restarts"),
        ("touch trained", 0, 1, "trap : DEBUG EXIT\nexit 0\n", HOOK_ENDED),
        (["missing-program"], 0, 1, "", "it ended with status 127, that of a shell without the command"),
        ("kill -9 $PPID; sleep 60", 0, 1, "", "its supervisor was killed by signal 9 (see trials/1/log.txt)"),
        ("echo not this; echo bad flag; exit 2", 1, 2, "", "it ended with status 2, after 1 restarts: bad flag\n"),
        ('test "$BY" = hook && exit 7', 0, 1, "export BY=hook\n", "it ended with status 7, after 0 restarts"),
    ],
)
def test_failure_has_reason(entrypoint: Any, restarts: int, runs: int, hook: str, reason: str, tmp_path: Path) -> None:
    sections = {"entrypoint": entrypoint, "max_restarts": restarts, "log_policies": [POLICY]}
    config = write_project(tmp_path / "project", **sections)
    (config.parent / "startup-hook.sh").write_text(hook)
    error = run("run", config, config.parent, "--experiments", tmp_path, "--hook", "run", ends_with=1).stderr
    assert reason in error
    assert len(events_of(tmp_path / "small-1", "run_started")) == runs
    assert not [*tmp_path.rglob("hooked"), *tmp_path.rglob("trained")]
    assert reason in run("experiment", "show", tmp_path / "small-1").stdout


def test_saved_preemption_is_no_failure(tmp_path: Path) -> None:
    code = (
        "import sys; from trial_script import TASK, report; run = TASK['run_id']; "
        "report('checkpoint', run, {'checkpoint_id': f'after-{run}'}); sys.exit(75 if run < 4 else 0)"
    )
    kept = {"save_trial_latest": 9}
    experiment = run_project(tmp_path, entrypoint=["python3", "-c", code], checkpoint_storage=kept)
    assert [event["status"] for event in events_of(experiment, "run_ended")] == [75, 75, 75, 0]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            {"accuracy": 0.5, "f1": 0.1},
            "No trial has reported loss, the metric of the search; the validations reported ",
        ),
        ({"loss": "high"}, "No trial has reported a number for loss, the metric of the search; one value is 'high'."),
        (None, "No trial has reported loss, the metric of the search; no validation was reported."),
    ],
)
def test_missing_metric_is_named(metrics: dict[str, Any] | None, said: str, tmp_path: Path) -> None:
    code = "pass" if metrics is None else f"from trial_script import report; report('validation', 1, {metrics})"
    config = write_project(tmp_path / "project", entrypoint=["python3", "-c", code])
    assert f"warning: {said}" in run("run", config, config.parent, "--experiments", tmp_path).stderr
    assert f"message: {said}" in run("experiment", "show", tmp_path / "small-1").stdout
    assert said in run("experiment", "show", tmp_path / "small-1", "--best", ends_with=2).stderr


def test_hook_notices_nothing(tmp_path: Path) -> None:
    """The notes on its lines change none of its own values."""
    config = write_project(tmp_path / "project", entrypoint='test "$A" = "last 3 0 1"')
    hook = 'true last; A=$_; f() { return 3; }; f || A="$A $?"; true | false || A="$A ${PIPESTATUS[*]}"; export A\n'
    (config.parent / "startup-hook.sh").write_text(hook)
    run("run", config, config.parent, "--experiments", tmp_path, "--hook", "run")


def test_later_metrics_are_added(tmp_path: Path) -> None:
    code = (
        "from trial_script import report; report('validation', 1, {'loss': 2.0, 'batches': 1}); "
        "report('validation', 1, {'accuracy': 0.5, 'loss': 2.0}); report('validation', 1, {'loss': 2.0})"
    )
    searcher = {"name": "single", "metric": "accuracy", "smaller_is_better": False}
    experiment = run_project(tmp_path, entrypoint=["python3", "-c", code], searcher=searcher)
    assert [event["metrics"] for event in events_of(experiment, "validation_extended")] == [{"accuracy": 0.5}]
    (trial,) = json.loads(run("experiment", "show", experiment, "--json").stdout)["trials"]
    assert (trial["best"], trial["latest"]) == (0.5, 0.5)
    assert json.loads((experiment / "trials" / "best.json").read_text()) == {"1": 0.5}


def test_hook_runs_unless_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_project(tmp_path / "project", entrypoint="test -f hooked")
    hook = config.parent / "startup-hook.sh"
    arguments = ("run", config, config.parent, "--experiments", tmp_path)
    hook.write_text("touch hooked\n: it's " + "\n" * 50)
    error = run(*arguments, ends_with=2).stderr
    assert f"{hook}:1: touch hooked\n{hook}:2: : it's \n" in error
    assert f"{hook}: and 11 more lines\n" in error
    assert "--hook skip" in error
    assert not (tmp_path / "small-1").exists()
    hook.write_text("touch hooked\n")
    run(*arguments, "--hook", "run")
    monkeypatch.setenv("DET_LIGHTNING_HOOK", "skip")
    run(*arguments, ends_with=1)
    monkeypatch.delenv("DET_LIGHTNING_HOOK")
    run("experiment", "resume", tmp_path / "small-2", "--retry-failed", ends_with=1)  # it stays left out
    hook.write_text("touch hooked  # det-lightning: ok\n")
    assert "startup-hook.sh runs before each trial, here without a container" in run(*arguments).stderr
    hook.write_text("touch hooked\n")
    assert "startup-hook.sh is skipped in this smoke run" in run(*arguments, "--try", ends_with=1).stderr
    kept = {path.parents[1].name for path in tmp_path.glob("small-*/code/startup-hook.sh")}
    assert kept == {"small-1", "small-3"}


def test_invalid_hyperparameters_close_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may fail, or wait for a rank that is gone until they are killed."""
    monkeypatch.setattr("det_lightning.experiments.runner._GIVING_UP_S", 3)
    choices = {"ends_with": [0, 134], "lives_on_for_s": [0, 600]}
    hparams = {name: {"type": "categorical", "vals": values} for name, values in choices.items()}
    searcher = {"name": "grid", "metric": "loss"}
    experiment = run_project(tmp_path, hyperparameters={"invalid": True, **hparams}, searcher=searcher, max_restarts=5)
    ended = events_of(experiment, "run_ended")
    assert {(event["closed"], event["reason"]) for event in ended} == {("COMPLETED", "invalid hyperparameters")}
    assert sorted(event["status"] for event in ended) == [0, 134, 137, 137]


# The second: a shell, which ends at once when it is asked to, has started the script.
@pytest.mark.parametrize("entrypoint", ["exec python3 trial_script.py", "python3 trial_script.py; exit"])
def test_first_interrupt_pauses(entrypoint: str, tmp_path: Path) -> None:
    hparams = {"steps": 12, "waits_at": [2], "saves_for_s": 1}
    config = write_project(tmp_path / "project", hyperparameters=hparams, entrypoint=entrypoint)
    experiment = tmp_path / "small-1"
    arguments = ("run", config, tmp_path / "project", "--experiments", tmp_path)
    error = run_until(lambda: len(events_of(experiment, "validation")) >= 2, *arguments)
    assert f"experiment resume {experiment}" in error
    assert pids_of(experiment) == []
    run("experiment", "resume", experiment)
    assert [event["steps_completed"] for event in events_of(experiment, "validation")] == list(range(1, 13))


def test_second_interrupt_kills(tmp_path: Path) -> None:
    config = write_project(tmp_path / "project", hyperparameters={"waits_at": [1], "ignores_sigterm": True})
    experiment = tmp_path / "small-1"
    process = start("run", config, tmp_path / "project", "--experiments", tmp_path)
    wait_for(lambda: len(events_of(experiment, "validation")) >= 1)
    process.send_signal(signal.SIGINT)
    assert any(line.startswith("Pausing:") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert pids_of(experiment) == []


def test_orphans_save_and_resume(tmp_path: Path) -> None:
    config = write_project(
        tmp_path / "project",
        hyperparameters={"lr": RATES, "steps": 10, "waits_at": [3, 7]},
        searcher={"name": "random", "metric": "loss", "max_trials": 4, "max_concurrent_trials": 2},
    )
    planned = json.loads(run("run", config, "--dry-run").stdout)["trials"]
    experiment = tmp_path / "small-1"
    process = start("run", config, tmp_path / "project", "--experiments", tmp_path)
    # Two trials at a time, each of which waits twice.
    for number in (6, 14, 26, 34):
        wait_for(lambda: len(events_of(experiment, "validation")) >= number)  # noqa: B023
        process.kill()
        process.communicate()
        # At once: the trials of the dead runner may still be saving.
        process = start("experiment", "resume", experiment)
    process.communicate(timeout=120)
    assert process.returncode == 0
    created = [(event["trial"], event["seed"]) for event in events_of(experiment, "trial_created")]
    assert created == [(trial["id"], trial["trial_seed"]) for trial in planned]
    validations = events_of(experiment, "validation")
    for trial_id, _ in created:
        steps = [event["steps_completed"] for event in validations if event["trial"] == trial_id]
        assert steps == list(range(1, 11))
    assert {event["status"] for event in events_of(experiment, "run_ended")} <= {0, 75}
    assert pids_of(experiment) == []


def test_only_one_runner_at_a_time(tmp_path: Path) -> None:
    config = write_project(tmp_path / "project", hyperparameters={"waits_at": [1]})
    experiment = tmp_path / "small-1"
    process = start("run", config, tmp_path / "project", "--experiments", tmp_path)
    wait_for(lambda: len(events_of(experiment, "validation")) >= 1)
    assert "is run by another process" in run("experiment", "resume", experiment, ends_with=2).stderr
    runner = (experiment / "runner.pid").read_text()
    (experiment / "runner.pid").write_text(f"{runner.split()[0]} elsewhere")
    assert "is run by elsewhere, not by this machine" in run("experiment", "stop", experiment, ends_with=2).stderr
    (experiment / "runner.pid").write_text(runner)
    run("experiment", "stop", experiment)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert "No process runs the experiment" in (said := run("experiment", "stop", experiment).stderr)
    assert "the state is PAUSED" in said


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


def test_wrong_configuration_creates_nothing(tmp_path: Path) -> None:
    wrong = {"name": "random", "metric": "loss"}
    config = write_project(tmp_path / "project", searcher=wrong, max_restart=3)
    error = run("run", config, config.parent, "--experiments", tmp_path / "out", ends_with=2).stderr
    assert all(name in error for name in ("max_trials", "max_restart"))
    config = write_project(tmp_path / "project", searcher={**wrong, "max_trials": 1, "source_checkpoint_uuid": "abc"})
    error = run("run", config, config.parent, "--experiments", tmp_path / "out", ends_with=2).stderr
    assert "searcher.source_checkpoint_uuid is the id 'abc'" in error
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 8}}
    config = write_project(tmp_path / "project", searcher=searcher, entrypoint="no_module:Trial")
    error = run("run", config, config.parent, "--experiments", tmp_path / "out", ends_with=2).stderr
    assert "entrypoint: there is no module no_module in" in error
    assert not (tmp_path / "out").exists()


def test_missing_ray_is_named(tmp_path: Path) -> None:
    config = write_project(tmp_path / "project")
    code = "import sys; sys.modules['ray'] = None; from det_lightning.cli import main; main()"
    arguments = ["run", config, tmp_path / "project", "--experiments", tmp_path / "experiments", "--ray", "auto"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install -e '.[ray]'" in done.stderr
    assert not (tmp_path / "experiments").exists()


@pytest.mark.parametrize(
    ("checkpoint", "storage", "says"),
    [
        ("checkpoints/abc", None, "is the relative path 'checkpoints/abc', .* Write an absolute path, such as"),
        ("abc", None, "is the id 'abc': a checkpoint_storage that is missing or relative"),
        ("abc", "there", "missing or relative .* No experiment in .* has this .* absolute path or URL"),
        ("/nowhere/abc", None, "There is no checkpoint '/nowhere/abc'"),
    ],
)
def test_missing_source_checkpoint_is_an_error(checkpoint: str, storage: str | None, says: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    named = None if storage is None else {"type": "directory", "container_path": storage.format(tmp_path)}
    with pytest.raises(ExperimentError, match=rf"searcher\.source_checkpoint_uuid.*{says}"):
        find_source(checkpoint, named, tmp_path / "experiments")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_failed_experiment_names_its_logs(tmp_path: Path) -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 8}}
    config = write_project(tmp_path / "project", entrypoint="python3 -c 'raise OSError(5)'", searcher=searcher)
    result = run("run", config, config.parent, "--experiments", tmp_path, ends_with=1)
    (command,) = (line.partition("det-lightning ")[2] for line in result.stderr.splitlines() if "logs" in line)
    assert command == f"experiment logs {tmp_path / 'small-1'} 1"
    assert "OSError: 5" in run(*command.split()).stdout
