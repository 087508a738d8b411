"""Checkpoints go both ways, and a resumed run of ours is the uninterrupted one."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import import_from_path, pytorch
from tests.conformance.sides import SIDES, assert_same, frozen, load_trial, run
from tests.conformance.trials import EPOCH_LEN, Adversarial, Basic, Trial, of_side
from tests.trials import fit_trial


def checkpoints() -> list[Path]:
    storage = Path(os.environ["XDG_DATA_HOME"]) / "determined"
    return sorted((path.parent for path in storage.glob("*/metadata.json")), key=lambda p: p.stat().st_mtime_ns)


def load(side: str, path: Path, trial: type[Trial]) -> Any:
    return load_trial(side, path, trial_class=of_side(importlib.import_module(f"{side}.pytorch"), trial))


@pytest.mark.parametrize("init", [{}, {"hparams": {"lr": 0.1}, "exp_conf": {"name": "x"}}], ids=str)
@pytest.mark.parametrize("trial", [Basic, Adversarial])
@pytest.mark.parametrize("writer", SIDES)
def test_either_loads_what_either_wrote(writer: str, trial: Any, init: dict[str, Any]) -> None:
    written = run(writer, trial, init, max_length=7, checkpoint_policy="none")
    (path,) = checkpoints()
    for reader in SIDES:
        models = load(reader, path, trial).context.models
        assert frozen([model.state_dict() for model in models]) == written.final["weights"]


class Generating(Trial):
    build_training_data_loader = build_validation_data_loader = train_batch = evaluate_batch = None

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.generator = context.wrap_model(torch.nn.Linear(3, 3))


def test_trial_may_wrap_fewer_models() -> None:
    trace = run("determined", Adversarial, max_length=7, checkpoint_policy="none")
    for reader in SIDES:
        trial = load(reader, checkpoints()[-1], Generating)
        assert frozen([trial.generator.state_dict()])[1] == trace.final["weights"][1]


def test_changed_settings_are_in_checkpoints() -> None:
    class Changing(Basic):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.get_hparams()["network"]["widths"].append(batch_idx)
            self.context.get_experiment_config()["data"]["seen"] = batch_idx
            return super().train_batch(batch, epoch_idx, batch_idx)

    traces = []
    for side in SIDES:
        settings = {"hparams": {"network": {"widths": []}}, "exp_conf": {"name": "x", "data": {}}}
        traces.append(run(side, Changing, settings, max_length=4, checkpoint_period=2))
    assert_same(*traces)
    assert traces[1].checkpoints[-1]["load_data"]["hparams"] == {"network": {"widths": [0, 1, 2, 3]}}


@pytest.mark.parametrize("trial", [Basic, Adversarial])
def test_the_real_one_goes_on_from_ours(trial: Any) -> None:
    """It replays the data from batch 0, with the random state of the checkpoint; so it does from either."""
    traces = []
    for writer in SIDES:
        run(writer, trial, max_length=8, checkpoint_policy="none")
        uuid = checkpoints()[-1].name
        traces.append(run("determined", trial, max_length=14, latest_checkpoint=uuid))
    own, from_ours = traces
    assert from_ours.events == own.events
    assert from_ours.final == own.final


def test_ours_goes_on_at_the_next_batch() -> None:
    """Knowingly different: batches are counted on, and the shuffle begins a new pass, which no file tells of."""
    run("determined", Basic, max_length=EPOCH_LEN, checkpoint_policy="none")
    resume: dict[str, Any] = {"latest_checkpoint": str(checkpoints()[-1]), "checkpoint_policy": "none"}
    trace = run("det_lightning", Basic, max_length=EPOCH_LEN + 4, **resume)
    assert [entry[1:3] for entry in trace.named("train_batch")] == [(1, EPOCH_LEN + i) for i in range(4)]
    straight = run("determined", Basic, max_length=EPOCH_LEN, checkpoint_policy="none")
    assert trace.named("on_checkpoint_load_start")
    assert straight.final["weights"] != trace.final["weights"]


@pytest.mark.parametrize("stop", [1, 5, EPOCH_LEN, EPOCH_LEN + 3])
def test_resumed_run_ends_as_a_straight_one(stop: int) -> None:
    """Knowingly better: the real one renumbers its batches off-cluster; ours equals the run that was never stopped."""
    length = 2 * EPOCH_LEN + 3
    straight = run("determined", Basic, max_length=length, checkpoint_policy="none")
    run("det_lightning", Basic, max_length=stop, checkpoint_policy="none")
    resume: dict[str, Any] = {"latest_checkpoint": checkpoints()[-1].name, "checkpoint_policy": "none"}
    resumed = run("det_lightning", Basic, trial_seed=99, max_length=length, **resume)
    assert resumed.final == straight.final
    assert resumed.named("train_batch") == straight.named("train_batch")[stop:]


def test_best_works_off_cluster() -> None:
    """Knowingly different: the real one falls back to "all" even when the metric is named."""
    searcher = {"searcher": {"metric": "validation_loss", "smaller_is_better": False}}
    init = {"exp_conf": searcher, "hparams": {}}
    real, ours = (run(side, Basic, init, max_length=10, validation_period=2) for side in SIDES)
    values = [metrics["validation_loss"][3] for _, metrics in ours.named("on_validation_end")]
    losses = [float(np.frombuffer(bytes.fromhex(value), np.float32)[0]) for value in values]
    improvements = sum(loss > max(losses[:i], default=float("-inf")) for i, loss in enumerate(losses))
    final = int(losses[-1] <= max(losses[:-1]))
    assert len(real.checkpoints) == 5
    assert len(ours.checkpoints) == improvements + final


def test_code_in_a_checkpoint_builds_the_trial() -> None:
    Path("model_def.py").write_text(
        "import torch\nfrom det_lightning import pytorch\nfrom tests.conformance.trials import Basic, of_side\n"
        "class MyTrial(of_side(pytorch, Basic)):\n"
        "    def __init__(self, context, width=1):\n        super().__init__(context)\n        self.width = width\n"
    )
    with import_from_path(Path.cwd()):
        trial = fit_trial(importlib.import_module("model_def").MyTrial, checkpoint_storage=None)
    Path("model_def.py").unlink()
    loaded = pytorch.load_trial_from_checkpoint_path(str(checkpoints()[-1]), trial_kwargs={"width": 4})
    assert (type(loaded).__name__, loaded.width) == ("MyTrial", 4)
    assert torch.equal(loaded.model[0].weight, trial.model[0].weight)
