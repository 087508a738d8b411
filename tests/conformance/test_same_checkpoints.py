"""Checkpoints go both ways, and a resumed run of ours is the uninterrupted one."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.sides import SIDES, assert_same, frozen, run, seed
from tests.conformance.trials import EPOCH_LEN, adversarial, basic

pytest.importorskip("determined", reason="the real determined is not installed; run tox -e conformance")


def checkpoints() -> list[Path]:
    storage = Path(os.environ["XDG_DATA_HOME"]) / "determined"
    return sorted((path.parent for path in storage.glob("*/metadata.json")), key=lambda p: p.stat().st_mtime_ns)


def load(side: str, path: Path, make: Any, **kwargs: Any) -> Any:
    api = importlib.import_module(f"{side}.pytorch")
    if side == "determined":
        kwargs["torch_load_kwargs"] = {"weights_only": False}  # it cannot load on today's torch otherwise
    return api.load_trial_from_checkpoint_path(str(path), trial_class=make(api), **kwargs)


@pytest.mark.parametrize("hparams", [{}, {"init": {"hparams": {"lr": 0.1}, "exp_conf": {"name": "x"}}}], ids=str)
@pytest.mark.parametrize("make", [basic, adversarial])
@pytest.mark.parametrize("writer", SIDES)
@pytest.mark.parametrize("reader", SIDES)
def test_either_loads_what_either_wrote(reader: str, writer: str, make: Any, hparams: dict[str, Any]) -> None:
    trace = run(writer, make, max_length=lambda api: api.Batch(7), checkpoint_policy="none", **hparams)
    (path,) = checkpoints()
    trial = load(reader, path, make)
    weights = [model.state_dict() for model in trial.context.models]
    saved = torch.load(path / "state_dict.pth", weights_only=False)["models_state_dict"]
    for mine, written in zip(weights, saved, strict=True):
        assert all(torch.equal(mine[name], written[name]) for name in written)
    assert trace.final["weights"]


@pytest.mark.parametrize("reader", SIDES)
def test_a_trial_may_wrap_fewer_models_than_it_did(reader: str) -> None:
    def generating(api: Any) -> type:
        class Generating(api.PyTorchTrial):
            build_training_data_loader = build_validation_data_loader = train_batch = evaluate_batch = None

            def __init__(self, context: Any) -> None:
                self.context = context
                self.generator = context.wrap_model(torch.nn.Linear(3, 3))

        return Generating

    trace = run("determined", adversarial, max_length=lambda api: api.Batch(7), checkpoint_policy="none")
    trial = load(reader, checkpoints()[-1], generating)
    assert frozen([trial.generator.state_dict()])[1] == trace.final["weights"][1]


def test_settings_that_a_trial_changes_are_in_the_checkpoints_that_follow() -> None:
    def make(api: Any) -> type:
        class Changing(basic(api)):  # type: ignore[misc]
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                self.context.get_hparams()["network"]["widths"].append(batch_idx)
                self.context.get_experiment_config()["data"]["seen"] = batch_idx
                return super().train_batch(batch, epoch_idx, batch_idx)

        return Changing

    def settings() -> dict[str, Any]:
        return {"hparams": {"network": {"widths": []}}, "exp_conf": {"name": "x", "data": {}}}

    periods: dict[str, Any] = {"max_length": lambda api: api.Batch(4), "checkpoint_period": lambda api: api.Batch(2)}
    traces = [run(side, make, settings(), **periods) for side in SIDES]
    assert_same(*traces)
    assert traces[1].checkpoints[-1]["load_data"]["hparams"] == {"network": {"widths": [0, 1, 2, 3]}}


@pytest.mark.parametrize("make", [basic, adversarial])
def test_the_real_one_goes_on_from_ours_as_from_its_own(make: Any) -> None:
    """It replays the data from batch 0, with the random state of the checkpoint; so it does from either."""
    traces = []
    for writer in SIDES:
        run(writer, make, max_length=lambda api: api.Batch(8), checkpoint_policy="none")
        uuid = checkpoints()[-1].name
        traces.append(run("determined", make, max_length=lambda api: api.Batch(14), latest_checkpoint=uuid))
    own, from_ours = traces
    assert from_ours.events == own.events
    assert from_ours.final == own.final


def test_ours_goes_on_from_the_real_ones_at_the_next_batch() -> None:
    """Knowingly different: batches are counted on, and the shuffle begins a new pass, which no file tells of."""
    run("determined", basic, max_length=lambda api: api.Batch(EPOCH_LEN), checkpoint_policy="none")
    trace = run(
        "det_lightning",
        basic,
        max_length=lambda api: api.Batch(EPOCH_LEN + 4),
        latest_checkpoint=str(checkpoints()[-1]),
        checkpoint_policy="none",
    )
    assert [entry[1:3] for entry in trace.named("train_batch")] == [(1, EPOCH_LEN + i) for i in range(4)]
    straight = run("determined", basic, max_length=lambda api: api.Batch(EPOCH_LEN), checkpoint_policy="none")
    assert trace.named("on_checkpoint_load_start")
    assert straight.final["weights"] != trace.final["weights"]


@pytest.mark.parametrize("stop", [1, 5, EPOCH_LEN, EPOCH_LEN + 3])
def test_a_resumed_run_of_ours_ends_as_an_uninterrupted_one_of_determined(stop: int) -> None:
    """Knowingly better: the real one renumbers its batches off-cluster; ours equals the run that was never stopped."""
    length = 2 * EPOCH_LEN + 3
    straight = run("determined", basic, max_length=lambda api: api.Batch(length), checkpoint_policy="none")
    run("det_lightning", basic, max_length=lambda api: api.Batch(stop), checkpoint_policy="none")
    resumed = run(
        "det_lightning",
        basic,
        trial_seed=99,
        max_length=lambda api: api.Batch(length),
        checkpoint_policy="none",
        latest_checkpoint=checkpoints()[-1].name,
    )
    assert resumed.final == straight.final
    assert resumed.named("train_batch") == straight.named("train_batch")[stop:]


def test_best_with_a_metric_is_done_by_ours_off_cluster() -> None:
    """Knowingly different: the real one falls back to "all" even when the metric is named."""
    searcher = {"searcher": {"metric": "validation_loss", "smaller_is_better": False}}
    arguments: dict[str, Any] = {
        "init": {"exp_conf": searcher, "hparams": {}},
        "max_length": lambda api: api.Batch(10),
        "validation_period": lambda api: api.Batch(2),
    }
    real = run("determined", basic, **arguments)
    ours = run("det_lightning", basic, **arguments)
    losses = [float(torch.frombuffer(bytes.fromhex(e[1]["validation_loss"][3]), dtype=torch.float32)) for e in
              ours.named("on_validation_end")]  # fmt: skip
    improvements = sum(loss > max(losses[:i], default=float("-inf")) for i, loss in enumerate(losses))
    final = int(losses[-1] <= max(losses[:-1]))
    assert len(real.checkpoints) == 5
    assert len(ours.checkpoints) == improvements + final


def test_the_code_in_a_checkpoint_is_enough_to_build_the_trial() -> None:
    Path("model_def.py").write_text(
        "import torch\nfrom det_lightning import pytorch\nfrom tests.conformance.trials import basic\n"
        "class MyTrial(basic(pytorch)):\n"
        "    def __init__(self, context, width=1):\n        super().__init__(context)\n        self.width = width\n"
    )
    api = importlib.import_module("det_lightning.pytorch")
    seed(1)
    from det_lightning import import_from_path

    with import_from_path(Path.cwd()):
        model_def = importlib.import_module("model_def")
        with api.init(enable_tensorboard_logging=False) as context:
            trial = model_def.MyTrial(context)
            api.Trainer(trial, context, enable_progress_bar=False).fit(max_length=api.Batch(2))
    Path("model_def.py").unlink()
    loaded = api.load_trial_from_checkpoint_path(str(checkpoints()[-1]), trial_kwargs={"width": 4})
    assert (type(loaded).__name__, loaded.width) == ("MyTrial", 4)
    assert torch.equal(loaded.model[0].weight, trial.model[0].weight)
