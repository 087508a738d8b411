"""Subclasses of TrialModule that override what the trainer calls, with ``super()`` or without."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from tests.lightning import fit, pl, trainer
from tests.trials import EPOCH_LEN, SmallTrial, make_data, seed_everything, weights_of

ANSWERS = TrialModule.list_marked_methods()
HOOKS = [
    *("configure_callbacks", "setup", "configure_model", "teardown", "on_save_checkpoint", "on_load_checkpoint"),
    *("on_fit_start", "on_train_start", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
    *("on_validation_start", "on_validation_epoch_end", "on_validation_end", "on_validation_model_train"),
    *("on_predict_start", "on_predict_end", "on_test_start", "on_test_epoch_end", "on_test_end"),
]


class Predicting(SmallTrial):
    def predict_batch(self, batch: Any) -> torch.Tensor:
        prediction: torch.Tensor = self.head(self.body(batch[0]))
        return prediction


def results_of(module_class: type[TrialModule], directory: Path) -> list[Any]:
    """Return what a module does under all methods of a trainer."""
    checkpoints = pl.callbacks.ModelCheckpoint(directory, monitor="validation_loss", save_last=True)
    fitting = fit(module_class(Predicting), max_epochs=2, callbacks=[checkpoints])
    resumed = module_class(Predicting)
    trainer(max_epochs=3).fit(resumed, ckpt_path=checkpoints.last_model_path)
    data = torch.utils.data.DataLoader(make_data(), batch_size=25)
    return [
        {name: value.item() for name, value in fitting.callback_metrics.items()},
        checkpoints.best_model_score,
        weights_of(resumed.trial).tolist(),
        resumed.trial_run.state,
        trainer().validate(resumed, verbose=False),
        trainer().test(resumed, data, verbose=False),
        [prediction.tolist() for prediction in trainer().predict(resumed, data) or []],
    ]


def test_hooks_need_no_super(tmp_path: Path) -> None:
    called: set[str] = set()

    def override(hook: str) -> Any:
        def note(self: TrialModule, *arguments: Any, **keywords: Any) -> list[Any]:
            called.add(hook)
            return []

        return note

    overrides = {hook: override(hook) for hook in HOOKS}
    expected = results_of(TrialModule, tmp_path / "plain")
    own: Any = type("Module", (TrialModule,), overrides)
    inherited: Any = type("Module", (type("Mixin", (), overrides), TrialModule), {})
    for number, module_class in enumerate((own, inherited)):
        called.clear()
        assert results_of(module_class, tmp_path / str(number)) == expected
        assert called == {*HOOKS}


@pytest.mark.parametrize("hook", sorted(ANSWERS))
def test_replaced_answers_are_refused(hook: str) -> None:
    def override(self: TrialModule, dataloader_iter: Any = None) -> Any:
        return [[make_data()[:]]] if "dataloader" in hook else None

    message = rf"Module.{hook}\(\) does not call super\(\).{hook}\("
    with pytest.raises(errors.InvalidExperimentException, match=message) as refused:
        type("Module", (TrialModule,), {hook: override})
    assert ANSWERS[hook].instead in str(refused.value)
    with pytest.raises(errors.InvalidExperimentException, match=message):
        type("Module", (type("Mixin", (), {hook: override}), TrialModule), {})


@pytest.mark.parametrize("hook", ["training_step", "validation_step", "configure_optimizers"])
def test_a_missing_super_ends_the_run(hook: str) -> None:
    def override(self: TrialModule, dataloader_iter: Any = None) -> Any:
        return getattr(super(TrialModule, self), hook)() if self is None else None

    with pytest.raises(errors.InvalidExperimentException, match=rf"Module.{hook}\(\) has not called super\(\)"):
        trainer().fit(type("Module", (TrialModule,), {hook: override})(SmallTrial))


def test_a_hook_follows_the_trial() -> None:
    begun: list[str] = []

    class Watcher(pytorch.PyTorchCallback):
        def on_training_start(self) -> None:
            begun.append("training")

        def on_validation_start(self) -> None:
            begun.append("validation")

    class Trial(SmallTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"watcher": Watcher()}

    class Module(TrialModule):
        def on_train_start(self) -> None:
            super().on_train_start()
            begun.append("after training")

        def on_validation_start(self) -> None:
            begun.append("after validation")

    class Derived(Module):
        def on_train_start(self) -> None:
            super().on_train_start()

    trainer().fit(Derived(Trial))
    assert begun == ["training", "after training", "validation", "after validation"]


def test_checkpoints_follow_hooks(tmp_path: Path) -> None:
    class Module(TrialModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-0.1, 0.1)

        def on_validation_end(self) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.5)

    seed_everything()
    checkpoints = DeterminedCheckpoint(tmp_path, policy="none", period=pytorch.Batch(EPOCH_LEN))
    whole = Module(SmallTrial)
    trainer(max_epochs=3, callbacks=[checkpoints]).fit(whole)
    assert weights_of(whole.trial).abs().max() <= 0.05
    for directory in (path for path in tmp_path.iterdir() if (path / "metadata.json").exists()):
        resumed = Module(SmallTrial)
        trainer(max_epochs=3).fit(resumed, ckpt_path=directory)
        assert torch.equal(weights_of(resumed.trial), weights_of(whole.trial))


@pytest.mark.parametrize(
    ("hook", "other"),
    [
        ("train_dataloader", torch.utils.data.DataLoader(make_data())),
        ("val_dataloader", torch.utils.data.DataLoader(make_data())),
        ("configure_optimizers", torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)),
    ],
)
def test_other_answers_are_refused(hook: str, other: Any) -> None:
    def override(self: TrialModule) -> Any:
        getattr(super(type(self), self), hook)()
        return other

    with pytest.raises(errors.InvalidExperimentException, match=rf"must return what super\(\).{hook}\(\) returns"):
        trainer().fit(type("Module", (TrialModule,), {hook: override})(SmallTrial))


@pytest.mark.parametrize("several", [False, True])
def test_a_module_configures_callbacks(several: bool) -> None:
    class Module(TrialModule):
        def configure_callbacks(self) -> Any:
            stopping = pl.callbacks.EarlyStopping("validation_loss", patience=0, mode="max")
            return (stopping,) if several else stopping

    module = Module(SmallTrial)
    trainer(max_epochs=5).fit(module)
    assert module.trial_run.state.batches_trained == 2 * EPOCH_LEN


@pytest.mark.parametrize("calls_super", [False, True])
def test_no_callbacks_and_an_exception(calls_super: bool) -> None:
    class Failing(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            raise ZeroDivisionError

    class Module(TrialModule):
        def configure_callbacks(self) -> Any:
            if calls_super:
                super().configure_callbacks()

    fitting = trainer(gradient_clip_val=0.5)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fitting.fit(Module(Failing))
        assert fitting.gradient_clip_val == 0.5


@pytest.mark.parametrize("stage", ["training", "validation"])
def test_decorated_steps_are_called(stage: str) -> None:
    calls: list[Any] = []

    def counted(step: Any) -> Any:
        @functools.wraps(step)
        def counting(*arguments: Any, **keywords: Any) -> Any:
            calls.append(keywords)
            return step(*arguments, **keywords)

        return counting

    def override(self: TrialModule, dataloader_iter: Any) -> Any:
        return getattr(TrialModule, f"{stage}_step")(self, dataloader_iter)

    with pytest.raises(errors.InvalidExperimentException, match="below one decorator at most"):
        type("Module", (TrialModule,), {f"{stage}_step": counted(counted(override))})
    module = type("Module", (TrialModule,), {f"{stage}_step": counted(override)})
    trainer().fit(module(SmallTrial))
    assert calls


def test_a_hook_may_be_any_callable() -> None:
    calls: list[str] = []

    class Module(TrialModule):
        on_train_start = functools.partial(calls.append, "begun")

    module = Module(SmallTrial)
    trainer().fit(module)
    assert calls == ["begun"]
    assert module.trial_run.state.batches_trained == EPOCH_LEN


@pytest.mark.parametrize("stage", ["training", "validation"])
def test_steps_with_a_batch_are_refused(stage: str) -> None:
    class Module(TrialModule):
        def step(self, batch: Any, batch_idx: int) -> None:
            """Never called."""

    refusal = rf"Module has .* {stage}_step\(\): put it in the trial's .*; an override takes dataloader_iter"
    with pytest.raises(errors.InvalidExperimentException, match=refusal):
        type("Module", (Module,), {f"{stage}_step": Module.step})
    setattr(Module, f"{stage}_step", Module.step)
    with pytest.raises(errors.InvalidExperimentException, match=refusal):
        trainer().fit(Module(SmallTrial))
    assert trainer().predict(Module(Predicting), torch.utils.data.DataLoader(make_data(), batch_size=25))


@pytest.mark.parametrize(
    ("method", "way_out"),
    [
        ("on_after_batch_transfer", "change the batch in the trial's train_batch"),
        ("transfer_batch_to_device", "disable_auto_to_device"),
        ("optimizer_step", r"use on_before_optimizer_step\(\)"),
        ("lr_scheduler_step", r"wrap_lr_scheduler\(\)"),
    ],
)
def test_unused_overrides_are_refused(method: str, way_out: str) -> None:
    def override(self: TrialModule, batch: Any, *arguments: Any) -> Any:
        return batch

    module = type("Module", (TrialModule,), {method: override})(Predicting)
    for call in ("fit", "validate"):
        with pytest.raises(errors.InvalidExperimentException, match=rf"{method}\(\): .*{way_out}"):
            getattr(trainer(), call)(module)
    assert trainer().predict(module, torch.utils.data.DataLoader(make_data(), batch_size=25))  # which calls it


def test_answers_on_an_instance_are_refused() -> None:
    module = TrialModule(SmallTrial)
    module.configure_optimizers = lambda: None  # type: ignore[method-assign]  # as LightningCLI --optimizer does
    way_out = r"configure_optimizers\(\): make the optimizers and schedulers in the trial"
    with pytest.raises(errors.InvalidExperimentException, match=way_out):
        trainer().fit(module)


def test_a_hook_on_an_instance_is_called() -> None:
    calls: list[str] = []
    module = TrialModule(SmallTrial)
    module.on_train_start = lambda: calls.append("begun")  # type: ignore[method-assign]
    trainer().fit(module)
    assert calls == ["begun"]
    assert module.trial_run.state.batches_trained == EPOCH_LEN


def test_own_predictions_and_tests() -> None:
    class Module(TrialModule):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            prediction: torch.Tensor = self.trial.head(self.trial.body(inputs))
            return prediction

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("samples", float(len(batch[0])), batch_size=1, reduce_fx="sum")

    module = Module(SmallTrial)
    data = torch.utils.data.DataLoader(make_data(), batch_size=25)
    assert [len(prediction) for prediction in trainer().predict(module, data) or []] == [25, 25]
    assert trainer().test(module, data, verbose=False) == [{"samples": 50.0}]


def test_predict_batch_comes_before_forward() -> None:
    class Module(TrialModule):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return -inputs

    module = Module(Predicting)
    data = torch.utils.data.DataLoader(make_data(), batch_size=25)
    assert [prediction.shape for prediction in trainer().predict(module, data) or []] == [(25, 1), (25, 1)]
    assert module(torch.ones(1)) == -1


def test_a_subclass_evaluates_a_full_dataset() -> None:
    class Trial(SmallTrial):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch  # type: ignore[assignment]

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            raise NotImplementedError

    class Module(TrialModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("samples", float(len(batch[0])), batch_size=1, reduce_fx="sum")

    data = torch.utils.data.DataLoader(make_data(), batch_size=25)
    assert trainer().test(Module(Trial), data, verbose=False) == [{"samples": 50.0}]


@pytest.mark.parametrize(
    "name", ["build_trial", "add_trial", "start_trial_run", "trial_run", "list_marked_methods", "_attach"]
)
def test_names_of_the_driver_are_taken(name: str) -> None:
    with pytest.raises(
        errors.InvalidExperimentException, match=rf"{name}\(\): .* drives the trial: rename that of yours"
    ):
        type("Module", (TrialModule,), {name: lambda self: None})
    mixin = type("Mixin", (), {name: lambda self: None})
    with pytest.raises(errors.InvalidExperimentException, match=name):
        type("Module", (mixin, TrialModule), {})


def test_common_names_are_free() -> None:
    class Module(TrialModule):
        def __init__(self) -> None:
            super().__init__(SmallTrial)
            self.answered = self.validates_at_step_zero = self.builder = 1

        def build(self) -> None: ...

        driving = start_run = answers = adopt = built = build

    run = trainer()
    run.fit(Module())
    assert run.global_step == 2 * EPOCH_LEN
