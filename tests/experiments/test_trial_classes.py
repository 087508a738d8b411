"""Entrypoints that name a trial class: trained as ``Trainer.fit`` trains it, in as many processes as it has slots."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.checkpoint import CheckpointStorage, read_checkpoint
from det_lightning.compat import answering_determined
from det_lightning.core._task import TrialTask
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.overview import describe_experiment
from tests.experiments.running import events_of, run, write_project
from tests.warm_python import WarmPython

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "name": "linear",
    "entrypoint": "linear_trial:LinearTrial",
    "hyperparameters": {"lr": 0.1, "global_batch_size": 8},
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 10}},
    "min_validation_period": {"batches": 4},
    "optimizations": {"aggregation_frequency": 2},
    "reproducibility": {"experiment_seed": 7},
    "scheduling_unit": 5,
    "max_restarts": 0,
}


def run_experiment(folder: Path, *options: object, is_warm: bool = True, **sections: Any) -> Path:
    """Run the trial with some sections of the configuration changed; return the directory of the experiment."""
    project = folder / "project"
    project.mkdir(parents=True, exist_ok=True)
    (project / "linear_trial.py").write_bytes(Path(__file__).with_name("linear_trial.py").read_bytes())
    (project / "config.yaml").write_text(json.dumps({**CONFIG, **sections}))
    run("run", project / "config.yaml", project, "--experiments", folder, *options, is_warm=is_warm)
    return folder / "linear-1"


def validated(experiment: Path) -> list[int]:
    """Return the batches after which the trial was validated."""
    return [event["steps_completed"] for event in events_of(experiment, "validation")]


def losses_in(experiment: Path, trial: int = 1) -> list[float]:
    validations = events_of(experiment, "validation")
    return [event["metrics"]["validation_loss"] for event in validations if event["trial"] == trial]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment that has ended."""
    return run_experiment(tmp_path_factory.mktemp("trained"))


def weights_in(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor]
    (model,) = read_checkpoint(Path(checkpoint)).state["models_state_dict"]
    return model


ENDLESS = """
import det_lightning as det
from linear_trial import LinearTrial
with det.pytorch.init() as context:
    det.pytorch.Trainer(LinearTrial(context), context).fit(max_length=det.pytorch.Epoch(10**6))
"""


READS_LENGTH = """
import det_lightning as det
from linear_trial import LinearTrial
class Reads(LinearTrial):
    def __init__(self, context):
        super().__init__(context)
        assert context.get_experiment_config()["searcher"]["max_length"] == {"batches": 5000}
"""
CORE = """
import det_lightning as det
with det.core.init() as core_context:
    for step in range(4, 10**6, 4):
        core_context.train.report_training_metrics(step, {"loss": 1.0})
        core_context.train.report_validation_metrics(step, {"validation_loss": 1.0})
        with core_context.checkpoint.store_path({"steps_completed": step}):
            pass
"""
ASKS = f"{CORE}        if core_context.preempt.should_preempt():\n            break\n"
ASHA = {"name": "adaptive_asha", "metric": "validation_loss", "max_trials": 8, "max_length": {"batches": 5000}}


@pytest.mark.parametrize(
    ("entrypoint", "searcher"),
    [
        ("linear_trial:LinearTrial", ASHA),
        (["python3", "-c", ENDLESS], ASHA),
        ("reads_length:Reads", ASHA),
        ("linear_trial:LinearTrial", {"name": "single", "metric": "validation_loss", "max_steps": 4}),
        (["python3", "-c", ASKS], ASHA),
    ],
)
def test_try_trains_a_few_batches(entrypoint: Any, searcher: dict[str, Any], tmp_path: Path) -> None:
    sections = {"entrypoint": entrypoint, "searcher": searcher, "max_restarts": 5}
    storage = {"type": "shared_fs", "host_path": "/proc/none", "save_trial_latest": 3}
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "reads_length.py").write_text(READS_LENGTH)
    experiment = run_experiment(tmp_path, "--try", checkpoint_storage=storage, **sections)
    details = json.loads(run("experiment", "show", experiment, "--json").stdout)
    (trial,) = details["trials"]
    assert (details["state"], trial["batches"], trial["checkpoint"]) == ("COMPLETED", 4, None)
    assert len(events_of(experiment, "validation")) == 1
    assert len(events_of(experiment, "checkpoint")) == 1
    assert not (experiment / "checkpoints").exists()


def test_try_ends_scripts_that_never_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_lightning.experiments.runner._END_OF_TRY_S", 0)
    experiment = run_experiment(tmp_path, "--try", is_warm=False, entrypoint=["python3", "-c", CORE])
    assert [event["closed"] for event in events_of(experiment, "run_ended")] == ["COMPLETED"]


WHOLE = """
import det_lightning as det
from det_lightning.engine import train_and_evaluate
from linear_trial import LinearTrial
def require_all(records):
    assert sum(records) == 32, records
    return 32
class Whole(LinearTrial):
    def __init__(self, context):
        super().__init__(context)
        self.records = context.wrap_reducer(require_all, name="records", for_training=False)
    def build_validation_data_loader(self):
        return det.pytorch.DataLoader(super().build_validation_data_loader().dataset, batch_size=2)
    def evaluate_batch(self, batch):
        self.records.update(len(batch[0]))
        return super().evaluate_batch(batch)
train_and_evaluate._MOST_TRIED = MOST
"""


@pytest.mark.parametrize(("most", "is_cut"), [(100, False), (10, True)])
def test_try_validates_all_or_says_so(most: int, is_cut: bool, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "whole.py").write_text(WHOLE.replace("= MOST", f"= {most}"))
    experiment = run_experiment(tmp_path, "--try", entrypoint="whole:Whole")
    assert len(events_of(experiment, "validation")) == (not is_cut)
    said = "This smoke run ended the validation after its first 10 batches: there are no metrics."
    assert [event["text"] for event in events_of(experiment, "message")] == [said] * is_cut
    assert len(events_of(experiment, "checkpoint")) == 1


EXPLICIT = {"hparams": CONFIG["hyperparameters"], "exp_conf": {"searcher": {"metric": "validation_loss"}}}
LENGTHS = {"max_length": pytorch.Batch(10), "validation_period": pytorch.Batch(4)}


@pytest.mark.parametrize(
    ("init", "fit"), [({**EXPLICIT, "aggregation_frequency": 2}, LENGTHS), ({"exp_conf": CONFIG}, {})]
)
def test_trial_equals_fit(init: dict[str, Any], fit: dict[str, Any], trained: Path, tmp_path: Path) -> None:
    (created,) = events_of(trained, "trial_created")
    with answering_determined():
        from tests.experiments.linear_trial import LinearTrial

        with pytorch.init(trial_seed=created["seed"], **init) as context:
            trainer = pytorch.Trainer(LinearTrial(context), context, enable_progress_bar=False)
            trainer.fit(checkpoint_storage=tmp_path, **fit)
    expected = weights_in(CheckpointStorage(tmp_path).newest() or "")
    actual = weights_in(CheckpointStorage(trained / "checkpoints").newest() or "")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert validated(trained) == [4, 8, 10]


SCRIPT = """
from determined import pytorch
from linear_trial import LinearTrial

with pytorch.init() as context:
    pytorch.Trainer(LinearTrial(context), context, enable_progress_bar=False).fit()
"""


@pytest.mark.parametrize(
    "entrypoint",
    [
        "linear_trial:Trials.Linear",  # a nested class
        "python3 -m determined.exec.harness linear_trial:LinearTrial",
        "python3 -m determined.launch.torch_distributed --trial linear_trial:LinearTrial",
        ["python3", "-c", SCRIPT],  # reads the configuration
    ],
)
def test_entrypoint_trains(entrypoint: Any, tmp_path: Path) -> None:
    assert validated(run_experiment(tmp_path, entrypoint=entrypoint)) == [4, 8, 10]


SCRIPT_WITH_A_CALLBACK = """
import sys
from det_lightning import pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import Retention
from linear_trial import LinearTrial

told = []
checkpoints = DeterminedCheckpoint(
    *sys.argv[1:], policy="none", period=pytorch.Batch(4), on_complete=lambda *args: told.append(args),
    retention=Retention(0, 0, 1),
)
with pytorch.init() as context:
    pytorch.Trainer(LinearTrial(context), context, enable_progress_bar=False).fit(checkpoints=checkpoints)
assert [batches for _, batches in told] == [4, 8, 10]
"""


@pytest.mark.parametrize("own_storage", [[], ["../kept"]], ids=["the experiment's storage", "its own storage"])
def test_own_callback_reports_checkpoints(own_storage: list[str], tmp_path: Path) -> None:
    experiment = run_experiment(tmp_path, entrypoint=["python3", "-c", SCRIPT_WITH_A_CALLBACK, *own_storage])
    assert [event["status"] for event in events_of(experiment, "run_ended")] == [0]
    reported = events_of(experiment, "checkpoint")
    assert [event["steps_completed"] for event in reported] == [4, 8, 10]
    storage = CheckpointStorage(experiment / "trials/1/kept" if own_storage else experiment / "checkpoints")
    (kept,) = storage.list_ids()
    assert kept == reported[-1]["checkpoint_id"]
    assert storage.info(kept).metadata["trial"] == "1.1"
    (trial,) = describe_experiment(ExperimentDirectory.existing(experiment))["trials"]
    assert (trial["checkpoint_path"], trial["checkpoint_exists"]) == (storage.find(kept), True)
    # Each checkpoint is announced, then reported, then the earlier one is deleted.
    records = map(json.loads, (experiment / "trials/1/metrics.jsonl").read_text().splitlines())
    groups = [record["group"].removeprefix("checkpoint_") for record in records if "checkpoint" in record["group"]]
    assert groups == ["begun", "checkpoint", *(["begun", "checkpoint", "deleted"] * 2)]


@pytest.mark.parametrize("max_length", [{"epochs": 4}, {"records": 135}])  # 4 epochs of 32 records, and a rest
def test_search_by_length_validates_at_its_rungs(max_length: dict[str, int], tmp_path: Path) -> None:
    searcher = {
        "name": "adaptive_asha", "metric": "validation_loss", "max_trials": 2, "max_concurrent_trials": 1,
        "max_length": max_length, "divisor": 2, "mode": "aggressive",
    }  # fmt: skip
    experiment = run_experiment(tmp_path, searcher=searcher, min_validation_period={"batches": 0})
    first = [event["metrics"]["epochs"] for event in events_of(experiment, "validation") if event["trial"] == 1]
    assert first == [2, 4][: len(first)]
    assert len(first) >= 1
    assert {event["closed"] for event in events_of(experiment, "run_ended")} == {"COMPLETED"}


def test_invalid_hyperparameters_close_a_trial(
    tmp_path: Path, warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank that gives up is enough: the others end by themselves, long before they would be killed."""
    monkeypatch.setattr(sys, "executable", warm_python.executable)
    monkeypatch.setattr("det_lightning.experiments.runner._GIVING_UP_S", 100)
    sections = {
        "hyperparameters": {**CONFIG["hyperparameters"], "invalid_on": {"type": "categorical", "vals": [0, 1]}},
        "searcher": {**CONFIG["searcher"], "name": "grid"},
        "resources": {"slots_per_trial": 2},
    }
    experiment = run_experiment(tmp_path, "--cpu", is_warm=False, max_restarts=2, **sections)
    ended = [(event["status"], event["closed"], event["reason"]) for event in events_of(experiment, "run_ended")]
    assert ended == [(0, "COMPLETED", "invalid hyperparameters")] * 2  # a trial for each rank


def test_slots_are_processes(tmp_path: Path) -> None:
    experiment = run_experiment(tmp_path, "--cpu", resources={"slots_per_trial": 2})
    checkpoint = events_of(experiment, "checkpoint")[-1]["checkpoint_id"]
    assert read_checkpoint(experiment / "checkpoints" / checkpoint).resume.world_size == 2
    records = [json.loads(line) for line in (experiment / "trials" / "1" / "metrics.jsonl").read_text().splitlines()]
    validated = [record["steps_completed"] for record in records if record["group"] == "validation"]
    assert validated == sorted(set(validated)) != []


def test_several_slots_need_gpus_or_cpu(tmp_path: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several GPUs")
    (tmp_path / "config.yaml").write_text(json.dumps({**CONFIG, "resources": {"slots_per_trial": 2}}))
    error = run("run", tmp_path / "config.yaml", tmp_path, "--experiments", tmp_path / "out", ends_with=2).stderr
    assert "--cpu for 2 processes on the CPU" in error
    assert "--slots" in error
    assert not (tmp_path / "out").exists()


def test_trials_know_others_best(tmp_path: Path) -> None:
    hparams = {"lr": {"type": "categorical", "vals": [0.1, 0.0]}, "global_batch_size": 8}
    searcher = {**CONFIG["searcher"], "name": "grid"}
    experiment = run_experiment(tmp_path, "--slots", "1", hyperparameters=hparams, searcher=searcher)
    best = {trial_id: min(losses_in(experiment, trial_id)) for trial_id in (1, 2)}
    assert json.loads((experiment / "trials" / "best.json").read_text()) == {"1": best[1], "2": best[2]}
    for trial_id, other in ((1, 2), (2, 1)):
        assert TrialTask.read(experiment / "trials" / str(trial_id) / "task.json").best_of_others() == best[other]


def test_warm_start_counts_from_zero(trained: Path, tmp_path: Path) -> None:
    checkpoint = CheckpointStorage(trained / "checkpoints").newest()
    started = run_experiment(tmp_path, searcher={**CONFIG["searcher"], "source_checkpoint_uuid": checkpoint})
    assert validated(started) == [4, 8, 10]
    assert losses_in(started)[0] < losses_in(trained)[-1]


OWN = {"checkpoint_storage": {"type": "directory", "container_path": "saved"}}


@pytest.mark.parametrize(("sections", "of_next"), [({}, [{}]), (OWN, [OWN, {}])])
def test_warm_start_finds_ids_of_neighbours(sections: Any, of_next: list[dict[str, Any]], tmp_path: Path) -> None:
    first = run_experiment(tmp_path, **sections)
    newest = next(CheckpointStorage(first / ("saved" if sections else "checkpoints")).newest_first())
    (tmp_path / "damaged-1").mkdir()
    (tmp_path / "damaged-1" / "events.jsonl").touch()
    searcher = {**CONFIG["searcher"], "source_checkpoint_uuid": Path(newest).name}
    config = tmp_path / "project" / "config.yaml"
    for number, changed in enumerate(of_next, start=2):
        config.write_text(json.dumps({**CONFIG, **changed, "searcher": searcher}))
        run("run", config, config.parent, "--experiments", tmp_path, is_warm=True)
        assert losses_in(tmp_path / f"linear-{number}")[0] < losses_in(first)[-1]


def test_metrics_and_progress_are_kept(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "trials" / "1" / "metrics.jsonl").read_text().splitlines()]
    losses = [(one["steps_completed"], type(one["metrics"]["loss"])) for one in records if one["group"] == "training"]
    assert losses == [(batches, float) for batches in (4, 5, 8, 10)]
    progress = next(one for one in records if one["group"] == "progress")
    assert (progress["steps_completed"], progress["metrics"]) == (4, {"progress": 0.4})


def test_csv_logger_has_metrics_and_hparams(tmp_path: Path) -> None:
    experiment = run_experiment(tmp_path, "--logger", "csv", hyperparameters={"lr": 0.1, "global_batch_size": 8})
    logged = experiment / "trials" / "1" / "csv" / "run-1"
    with (logged / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    validations = {int(row["step"]): float(row["validation_loss"]) for row in rows if row["validation_loss"]}
    events = events_of(experiment, "validation")
    reported = {event["steps_completed"]: event["metrics"]["validation_loss"] for event in events}
    assert validations == pytest.approx(reported)
    assert any(row["loss"] for row in rows)
    assert "lr: 0.1" in (logged / "hparams.yaml").read_text()


def test_unusable_loggers_are_named_first(tmp_path: Path) -> None:
    missing = [package for package in ("mlflow", "wandb") if importlib.util.find_spec(package) is None]
    config = write_project(tmp_path / "project")
    options = [part for name in ("csv", "excel", *missing) for part in ("--logger", name)]
    error = run("run", config, tmp_path / "project", "--experiments", tmp_path / "out", *options, ends_with=2).stderr
    assert "--logger excel: must be one of csv, tensorboard, mlflow, wandb" in error
    for package in missing:
        assert f"--logger {package}: needs a package; pip install {package}" in error
    assert not (tmp_path / "out").exists()
