"""The hooks of callbacks and of subclasses of TrialModule: called as those of any LightningModule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from tests.adapters.training import Predicting, trained
from tests.lightning import fit, pl, trainer
from tests.trials import EPOCH_LEN, SmallTrial, failing_at, make_data, weights_of

UPDATE_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


def at(moment: str, use: Callable[..., Any]) -> pl.Callback:
    """Return a callback that does something with what its hook gets beside the trainer and the module."""
    hooks: Any = {f"on_{moment}": lambda trainer, module, *rest: use(*rest)}
    return pl.callbacks.LambdaCallback(**hooks)


def test_profilers_show_updates() -> None:
    profiler = pl.profilers.SimpleProfiler()
    fit(TrialModule(SmallTrial), profiler=profiler)
    names = ("run_training_batch", "backward", "optimizer_step")
    assert [len(profiler.recorded_durations[name]) for name in names] == [EPOCH_LEN, EPOCH_LEN, 2 * EPOCH_LEN]


def test_spike_detection_ends_a_run(tmp_path: Path) -> None:
    class Trial(SmallTrial):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) * (1e6 if self.context.current_train_batch() == 5 else 1)

    detection = pl.callbacks.SpikeDetection(warmup=3, exclude_batches_path=tmp_path / "batches.json")
    with pytest.raises(RuntimeError, match="spike"):
        fit(TrialModule(Trial), callbacks=[detection])


@pytest.mark.parametrize("loss", [0.5, None, "text"])
def test_outputs_are_those_of_train_batch(loss: Any) -> None:
    class Trial(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            return {"loss": loss, "tensor": super().train_batch(batch, epoch_idx, batch_idx)["loss"]}

    seen: list[dict[str, Any]] = []
    fit(TrialModule(Trial), max_steps=2, callbacks=[at("train_batch_end", lambda outputs, *_: seen.append(outputs))])
    assert [list(outputs) for outputs in seen] == [["loss", "tensor"]]
    assert seen[0]["loss"] == loss
    assert seen[0]["tensor"].requires_grad


def test_a_single_tensor_is_the_loss() -> None:
    class Trial(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return super().train_batch(batch, epoch_idx, batch_idx)["loss"]

    losses: list[torch.Tensor] = []
    fit(TrialModule(Trial), callbacks=[at("train_batch_end", lambda outputs, *_: losses.append(outputs["loss"]))])
    assert len(losses) == EPOCH_LEN
    assert not any(loss.requires_grad for loss in losses)


def test_a_hook_changes_a_batch() -> None:
    class Trial(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            assert batch[0].sum() == 0
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(TrialModule(Trial), callbacks=[at("train_batch_start", lambda batch, batch_idx: batch[0].zero_())])


def test_hooks_get_the_batch_after_a_resume(tmp_path: Path) -> None:
    seen: list[Any] = []
    watcher = at("train_batch_start", lambda batch, index: seen.append((index, batch[1].tolist())))
    trained(max_epochs=2, callbacks=[watcher])
    checkpoints = DeterminedCheckpoint(tmp_path / "checkpoints", policy="none", code_dir=tmp_path)
    trained(max_steps=6, callbacks=[checkpoints])
    trained(SmallTrial, checkpoints.last_checkpoint_path, max_epochs=2, callbacks=[watcher])
    straight, resumed = seen[: 2 * EPOCH_LEN], seen[2 * EPOCH_LEN :]
    assert [index for index, _ in resumed] == [3, 4, 5, 6, *range(EPOCH_LEN)]
    assert resumed == straight[3:]


def test_hooks_are_called_for_data_without_a_length() -> None:
    class Batches(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(make_data())

    class Trial(SmallTrial):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.experimental.disable_dataset_reproducibility_checks()

        def build_validation_data_loader(self) -> Any:
            return torch.utils.data.DataLoader(Batches(), batch_size=16)

    seen: list[Any] = []
    start = at("validation_batch_start", lambda batch, index, *_: seen.append((index, len(batch[0]))))
    end = at("validation_batch_end", lambda outputs, batch, index, *_: seen.append((index, list(outputs))))
    fit(TrialModule(Trial), callbacks=[start, end])
    assert seen[::2] == [*enumerate([16, 16, 16, 2])]
    assert seen[1::2] == [*enumerate([["validation_loss"]] * 4)]


def test_a_skipped_batch_comes_again() -> None:
    seen: list[int] = []

    class Module(TrialModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            seen.append(batch_idx)
            return -1 if len(seen) == 3 else None

    fit(Module(SmallTrial), max_epochs=2)
    assert seen[:4] == [0, 1, 2, 2]


def test_a_module_logs_from_any_hook() -> None:
    def logging(hook: str) -> Any:
        def log(trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
            module.log(f"{hook} by default", 0.25)
            module.log(f"{hook} on_epoch", 0.25, on_epoch=True)

        return log

    moments = [f"{of}_{at}" for of in ("", "_epoch", "_batch") for at in ("start", "end")]
    hooks = [f"on_{stage}{moment}" for stage in ("train", "validation") for moment in moments]
    hooks = [*(hook for hook in hooks if hook not in ("on_train_end", "on_validation_end")), *UPDATE_HOOKS]
    watcher = pl.callbacks.LambdaCallback(**{hook: logging(hook) for hook in hooks})
    trainer = fit(TrialModule(SmallTrial), max_steps=6, callbacks=[watcher], val_check_interval=2)
    logged = [trainer.callback_metrics[f"{hook} {how}"] for hook in hooks for how in ("by default", "on_epoch")]
    assert logged == [0.25] * 2 * len(hooks)


def test_epoch_means_count_samples() -> None:
    class Trial(SmallTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(make_data(), batch_size=40)

    class Module(TrialModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("index", float(batch_idx), on_epoch=True)

    assert fit(Module(Trial)).callback_metrics["index"] == pytest.approx(10 / 50)


# Subclasses that override what the trainer calls, with super() or without


DATA = torch.utils.data.DataLoader(make_data(), batch_size=25)
ANSWERS = TrialModule.list_marked_methods()
HOOKS = [
    *("configure_callbacks", "setup", "configure_model", "teardown", "on_save_checkpoint", "on_load_checkpoint"),
    *("on_fit_start", "on_train_start", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
    *("on_validation_start", "on_validation_epoch_end", "on_validation_end", "on_validation_model_train"),
    *("on_predict_start", "on_predict_end", "on_test_start", "on_test_epoch_end", "on_test_end"),
]


def results_of(module_class: type[TrialModule], directory: Path) -> list[Any]:
    """Return what a module does under all methods of a trainer."""
    checkpoints = pl.callbacks.ModelCheckpoint(directory, monitor="validation_loss", save_last=True)
    fitting = fit(module_class(Predicting), max_epochs=2, callbacks=[checkpoints])
    resumed = trained(module_class(Predicting), checkpoints.last_model_path, max_epochs=3)
    return [
        {name: value.item() for name, value in fitting.callback_metrics.items()},
        checkpoints.best_model_score,
        weights_of(resumed.trial).tolist(),
        resumed.trial_run.state,
        trainer().validate(resumed, verbose=False),
        trainer().test(resumed, DATA, verbose=False),
        [prediction.tolist() for prediction in trainer().predict(resumed, DATA) or []],
    ]


def test_hooks_need_no_super(tmp_path: Path) -> None:
    called: list[str] = []
    overrides: dict[str, Any] = {hook: lambda *_, hook=hook, **__: called.append(hook) for hook in HOOKS}
    expected = results_of(TrialModule, tmp_path / "plain")
    own: Any = type("Module", (TrialModule,), overrides)
    inherited: Any = type("Module", (type("Mixin", (), overrides), TrialModule), {})
    for number, module_class in enumerate((own, inherited)):
        called.clear()
        assert results_of(module_class, tmp_path / str(number)) == expected
        assert {*called} == {*HOOKS}


@pytest.mark.parametrize("hook", sorted(ANSWERS))
@pytest.mark.parametrize("inherits", [False, True])
def test_a_missing_super_ends_the_run(hook: str, inherits: bool) -> None:
    def override(self: TrialModule, dataloader_iter: Any = None) -> Any:
        return [[make_data()[:]]] if "dataloader" in hook else None

    bases = (type("Mixin", (), {hook: override}), TrialModule) if inherits else (TrialModule,)
    module = type("Module", bases, {} if inherits else {hook: override})(SmallTrial)
    message = rf"Module.{hook}\(\) has not called super\(\)"
    with pytest.raises(errors.InvalidExperimentException, match=message) as refused:
        trainer().fit(module)
    assert ANSWERS[hook].instead in str(refused.value)


def test_a_hook_follows_the_trial() -> None:
    begun: list[str] = []

    class Trial(SmallTrial, pytorch.PyTorchCallback):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"itself": self}

        def on_training_start(self) -> None:
            begun.append("training")

        def on_validation_start(self) -> None:
            begun.append("validation")

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
            for parameter in self.parameters():
                parameter.data.clamp_(-0.1, 0.1)

        def on_validation_end(self) -> None:
            for parameter in self.parameters():
                parameter.data.mul_(0.5)

    checkpoints = DeterminedCheckpoint(tmp_path, policy="none", period=pytorch.Batch(EPOCH_LEN))
    whole = trained(Module(SmallTrial), max_epochs=3, callbacks=[checkpoints])
    assert weights_of(whole.trial).abs().max() <= 0.05
    for directory in (path.parent for path in tmp_path.glob("*/metadata.json")):
        resumed = trained(Module(SmallTrial), directory, max_epochs=3)
        assert torch.equal(weights_of(resumed.trial), weights_of(whole.trial))


OTHER_OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize("hook", ["train_dataloader", "val_dataloader", "configure_optimizers"])
def test_other_answers_are_refused(hook: str) -> None:
    def override(self: TrialModule) -> Any:
        getattr(super(type(self), self), hook)()
        return OTHER_OPTIMIZER if hook == "configure_optimizers" else DATA

    with pytest.raises(errors.InvalidExperimentException, match=rf"must return what super\(\).{hook}\(\) returns"):
        trainer().fit(type("Module", (TrialModule,), {hook: override})(SmallTrial))


@pytest.mark.parametrize("several", [False, True])
def test_a_module_configures_callbacks(several: bool) -> None:
    class Module(TrialModule):
        def configure_callbacks(self) -> Any:
            stopping = pl.callbacks.EarlyStopping("validation_loss", patience=0, mode="max")
            return (stopping,) if several else stopping

    assert trained(Module(SmallTrial), max_epochs=5).trial_run.state.batches_trained == 2 * EPOCH_LEN


@pytest.mark.parametrize("calls_super", [False, True])
def test_flags_are_restored_after_an_exception(calls_super: bool) -> None:
    class Module(TrialModule):
        def configure_callbacks(self) -> Any:
            if calls_super:
                super().configure_callbacks()

    fitting = trainer(gradient_clip_val=0.5)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fitting.fit(Module(failing_at(0, ZeroDivisionError())))
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
    trained(type("Module", (TrialModule,), {f"{stage}_step": counted(override)})(SmallTrial))
    assert calls


@pytest.mark.parametrize("of_instance", [False, True])
def test_a_hook_may_be_any_callable(of_instance: bool) -> None:
    calls: list[str] = []
    hook = functools.partial(calls.append, "begun")
    module = type("Module", (TrialModule,), {} if of_instance else {"on_train_start": hook})(SmallTrial)
    if of_instance:
        module.on_train_start = hook
    assert trained(module).trial_run.state.batches_trained == EPOCH_LEN
    assert calls == ["begun"]


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
    assert trainer().predict(Module(Predicting), DATA)


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
    assert trainer().predict(module, DATA)  # which calls it


def test_answers_on_an_instance_are_refused() -> None:
    module = TrialModule(SmallTrial)
    module.configure_optimizers = lambda: None  # type: ignore[method-assign]  # as LightningCLI --optimizer does
    way_out = r"configure_optimizers\(\): make the optimizers and schedulers in the trial"
    with pytest.raises(errors.InvalidExperimentException, match=way_out):
        trainer().fit(module)


class OwnSteps(TrialModule):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return -inputs

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[0])), batch_size=1, reduce_fx="sum")


class OnFullDataset(SmallTrial):
    evaluate_batch: Any = pytorch.PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        raise NotImplementedError


@pytest.mark.parametrize("trial_class", [SmallTrial, OnFullDataset])
def test_own_steps_predict_and_test(trial_class: type[SmallTrial]) -> None:
    module = OwnSteps(trial_class)
    assert [prediction.shape for prediction in trainer().predict(module, DATA) or []] == [(25, 4), (25, 4)]
    assert trainer().test(module, DATA, verbose=False) == [{"samples": 50.0}]


def test_predict_batch_comes_before_forward() -> None:
    module = OwnSteps(Predicting)
    assert [prediction.shape for prediction in trainer().predict(module, DATA) or []] == [(25, 1), (25, 1)]
    assert module(torch.ones(1)) == -1


DRIVERS = ["build_trial", "add_trial", "start_trial_run", "trial_run", "list_marked_methods", "_prepare_trainer"]


@pytest.mark.parametrize("name", DRIVERS)
def test_names_of_the_driver_are_taken(name: str) -> None:
    refusal = rf"{name}\(\): .* drives the trial: rename that of yours"
    with pytest.raises(errors.InvalidExperimentException, match=refusal):
        type("Module", (TrialModule,), {name: lambda self: None})
    with pytest.raises(errors.InvalidExperimentException, match=refusal):
        type("Module", (type("Mixin", (), {name: lambda self: None}), TrialModule), {})


def test_common_names_are_free() -> None:
    class Module(TrialModule):
        def __init__(self) -> None:
            super().__init__(SmallTrial)
            self.answered = self.validates_at_step_zero = self.builder = 1

        def build(self) -> None: ...

        driving = start_run = answers = adopt = built = build

    assert fit(Module()).global_step == 2 * EPOCH_LEN
