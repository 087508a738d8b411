"""``fit(checkpoints=DeterminedCheckpoint(...))``: the callback says all about the checkpoints of the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointPolicy, CheckpointStorage, Retention
from tests.lightning import trainer
from tests.trials import SmallTrial, failing_at, fit_trial, seed_everything, weights_of


def fit(length: int, trial_class: Any = SmallTrial, exp_conf: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Train up to a number of batches; return the trial."""
    seed_everything()
    return fit_trial(trial_class, hparams={}, exp_conf=exp_conf, max_length=pytorch.Batch(length), **arguments)


def saved_in(storage: Path) -> dict[int, dict[str, Any]]:
    """Return the metadata of the checkpoints, by the number of batches."""
    found = [json.loads(file.read_text()) for file in storage.glob("*/metadata.json")]
    return {metadata["steps_completed"]: metadata for metadata in found}


# What is said twice


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"checkpoint_policy": "best"}, "checkpoint_policy='best', but the callback has policy='all'"),
        ({"checkpoint_period": pytorch.Batch(2)}, r"_period=Batch\(2\), but the callback has period=Batch\(4\)"),
        ({"checkpoint_period": pytorch.Epoch(4)}, r"_period=Epoch\(4\), but the callback has period=Batch\(4\)"),
        (
            {"checkpoint_policy": "none", "checkpoint_period": pytorch.Batch(2), "checkpoint_storage": "elsewhere"},
            r"policy='all'; and .*period=Batch\(4\); and checkpoint_storage=\.\.\., but the callback writes to .*once",
        ),
    ],
)
def test_all_contradictions_are_named(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fit(2, checkpoints=DeterminedCheckpoint(tmp_path, policy="all", period=pytorch.Batch(4)), **said)
    assert list(tmp_path.iterdir()) == []


def test_a_rule_may_be_repeated(tmp_path: Path) -> None:
    checkpoints = DeterminedCheckpoint(tmp_path, policy="none", period=pytorch.Batch(2))
    fit(4, checkpoints=checkpoints, checkpoint_policy="none", checkpoint_period=pytorch.Batch(2))
    assert sorted(saved_in(tmp_path)) == [2, 4]


# What the callback says


def test_the_callback_selects_code(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "model.py").write_text("LAYERS = 1\n")
    (project / ".env").write_text("TOKEN=1\n")
    for with_secrets, copied in ((False, ["model.py"]), (True, [".env", "model.py"])):
        storage = tmp_path / str(with_secrets)
        of_code: dict[str, Any] = {"code_dir": project, "code_with_secrets": with_secrets}
        fit(1, checkpoints=DeterminedCheckpoint(storage, policy="none", **of_code))
        (code,) = storage.glob("*/code")
        assert sorted(file.name for file in code.iterdir()) == copied


def test_a_restarted_job_resumes_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchruns")
    fit(2, checkpoints=DeterminedCheckpoint(tmp_path, policy="none", job="mine"))
    fit(4, checkpoints=DeterminedCheckpoint(tmp_path, policy="none", job="another"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert (
        fit(6, checkpoints=DeterminedCheckpoint(tmp_path, policy="none", job="mine")).context.get_initial_batch() == 2
    )


# The storage of the configuration


def test_the_storage_defaults_to_the_configuration(tmp_path: Path) -> None:
    kept = {"save_trial_best": 0, "save_trial_latest": 1}
    section = {"type": "directory", "container_path": str(tmp_path / "configured"), **kept}
    without = DeterminedCheckpoint(policy="none", period=pytorch.Batch(2))
    fit(6, exp_conf={"checkpoint_storage": section}, checkpoints=without)
    assert sorted(saved_in(tmp_path / "configured")) == [6]
    with_own = DeterminedCheckpoint(tmp_path / "own", policy="none", period=pytorch.Batch(2))
    fit(6, exp_conf={"checkpoint_storage": section}, checkpoints=with_own)
    assert sorted(saved_in(tmp_path / "own")) == [2, 4, 6]


def test_each_fit_has_a_storage(tmp_path: Path) -> None:
    checkpoints = DeterminedCheckpoint(policy="none")
    for name in ("first", "second"):
        section = {"type": "directory", "container_path": str(tmp_path / name)}
        fit(2, exp_conf={"checkpoint_storage": section}, checkpoints=checkpoints)
    fit(3, checkpoints=checkpoints)
    assert [sorted(saved_in(tmp_path / name)) for name in ("first", "second")] == [[2], [2]]
    assert sorted(saved_in(CheckpointStorage().root.local_path)) == [3]


# The policy of the configuration


CONFIGURATION = {
    "checkpoint_policy": "best",
    "min_checkpoint_period": {"batches": 5},
    "searcher": {"metric": "accuracy", "smaller_is_better": False},
}


class Worsens(SmallTrial):
    """Both metrics fall with the batches, so the first validation is the best for the searcher."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.accuracy = 1 / (batch_idx + 1)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "error": self.accuracy}


@pytest.mark.parametrize(
    ("own", "saved", "overridden"),
    [
        ({}, [2, 5, 6], ""),
        ({"policy": "best", "period": pytorch.Batch(5), "smaller_is_better": False}, [2, 5, 6], ""),
        ({"policy": "none"}, [5, 6], ""),
        ({"period": pytorch.Batch(3)}, [2, 3, 6], "period=Batch(3) in place of Batch(5)"),
        ({"metric": "error"}, [2, 4, 5, 6], "metric='error' in place of 'accuracy'"),
        ({"smaller_is_better": True}, [2, 4, 5, 6], "smaller_is_better=True in place of False"),
    ],
)
def test_the_configuration_fills_gaps(
    own: dict[str, Any], saved: list[int], overridden: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = DeterminedCheckpoint(tmp_path, **own)
    fit(6, Worsens, CONFIGURATION, checkpoints=checkpoints, validation_period=pytorch.Batch(2))
    assert sorted(saved_in(tmp_path)) == saved
    warnings = [record.message for record in caplog.records if "overrides" in record.message]
    message = f"DeterminedCheckpoint overrides the experiment configuration: {overridden}."
    assert warnings == ([message] if overridden else [])


def test_the_call_fills_gaps(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"checkpoint_policy": "none", "checkpoint_period": pytorch.Batch(2)}
    fit(5, exp_conf=CONFIGURATION, checkpoints=DeterminedCheckpoint(tmp_path), **arguments)
    assert sorted(saved_in(tmp_path)) == [2, 4, 5]


@pytest.mark.parametrize(("exp_conf", "saved"), [(CONFIGURATION, [2, 6]), (None, [2, 4, 6])])
def test_a_module_names_the_metric(exp_conf: dict[str, Any] | None, saved: list[int], tmp_path: Path) -> None:
    checkpoints = DeterminedCheckpoint(tmp_path)
    module = TrialModule(Worsens, exp_conf=exp_conf, validation_period=pytorch.Batch(2))
    trainer([checkpoints], max_steps=6 * 2).fit(module)
    assert sorted(saved_in(tmp_path)) == saved


# One callback, several runs


def test_a_second_fit_resumes_bit_equal(tmp_path: Path) -> None:
    rule = Retention(trial_best=0, trial_latest=1)
    checkpoints = DeterminedCheckpoint(tmp_path, policy="none", retention=rule, async_write=True)
    fit(4, checkpoints=checkpoints)
    first = checkpoints.last_checkpoint_id
    (metadata,) = saved_in(tmp_path).values()
    resumed = fit(9, checkpoints=checkpoints, latest_checkpoint=first)
    assert torch.equal(weights_of(resumed), weights_of(fit(9, checkpoint_policy="none")))
    assert checkpoints.last_checkpoint_id != first
    assert {steps: found["trial"] for steps, found in saved_in(tmp_path).items()} == {9: metadata["trial"]}


def test_second_fit_from_scratch_is_another_trial(tmp_path: Path) -> None:
    checkpoints = DeterminedCheckpoint(tmp_path, metric="validation_loss")
    fit(3, checkpoints=checkpoints)
    assert checkpoints.best_value is not None
    fit(4, checkpoints=checkpoints)
    assert len({metadata["trial"] for metadata in saved_in(tmp_path).values()}) == 2


def test_fit_after_a_failure_resumes_the_last_checkpoint(tmp_path: Path) -> None:
    checkpoints = DeterminedCheckpoint(tmp_path, policy="none", period=pytorch.Batch(2), async_write=True)
    with pytest.raises(ZeroDivisionError):
        fit(8, failing_at(5, ZeroDivisionError()), checkpoints=checkpoints)
    assert fit(8, checkpoints=checkpoints, latest_checkpoint="last").context.get_initial_batch() == 4
    assert sorted(saved_in(tmp_path)) == [2, 4, 6, 8]


# The policy says which validations are followed by a checkpoint


@pytest.mark.parametrize(
    ("smaller_is_better", "values", "improved"),
    [
        (True, [2.0, 3.0, 2.0, 1.0], [True, False, False, True]),
        (False, [2.0, 1.0, 2.0, 3.0], [True, False, False, True]),
        (True, [math.nan, 5.0, math.nan, 4.0], [True, True, False, True]),
    ],
)
def test_values_improve_on_the_best(smaller_is_better: bool, values: list[float], improved: list[bool]) -> None:
    policy = CheckpointPolicy(metric="loss", smaller_is_better=smaller_is_better)
    best = None
    for value, expected in zip(values, improved, strict=True):
        assert policy.improves(value, best) is expected
        best = value if expected else best


def validate_once(storage: Path, policy: str, metric: str | None, metrics: dict[str, Any]) -> list[int]:
    """Validate after the first of two batches; return the numbers of batches of the checkpoints."""

    class Trial(SmallTrial):
        evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return metrics

    checkpoints = DeterminedCheckpoint(storage, policy=policy, metric=metric)
    periods = {"max_length": pytorch.Batch(2), "validation_period": pytorch.Batch([1])}
    fit_trial(Trial, checkpoints=checkpoints, **periods)
    return sorted(info.metadata["steps_completed"] for info in CheckpointStorage(storage).list_checkpoints())


@pytest.mark.parametrize(
    ("policy", "metric", "metrics", "saved"),
    [
        ("best", "loss", {"loss": 2, "accuracy": 0.5}, [1, 2]),
        ("all", "loss", {"accuracy": 0.5}, [1, 2]),
        ("all", None, {"loss": 2}, [1, 2]),
        ("none", "loss", {"loss": "low"}, [2]),
    ],
)
def test_only_best_needs_the_metric(tmp_path: Path, policy: str, metric: str | None, metrics: Any, saved: Any) -> None:
    assert validate_once(tmp_path, policy, metric, metrics) == saved


def test_best_refuses_a_metric_that_is_no_number(tmp_path: Path) -> None:
    message = r"'loss', which must be a number; the validation returned \[.*'loss'\], and 'loss' is 'low'\."
    with pytest.raises(ValueError, match=message):
        validate_once(tmp_path, "best", "loss", {"loss": "low"})
