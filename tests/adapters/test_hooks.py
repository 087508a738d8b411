"""The hooks of callbacks and of subclasses of TrialModule: called as those of any LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.profilers import AdvancedProfiler, SimpleProfiler

from det_lightning.adapters import TrialModule
from tests.trials import EPOCH_LEN, SmallTrial, seed_everything, weights_of

UPDATE_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


def fit(module: TrialModule, **flags: Any) -> pl.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    seed_everything()
    trainer = pl.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **dict.fromkeys(off, False), **flags})
    trainer.fit(module)
    return trainer


class UpdateWatcher(pl.Callback):
    """Notes each hook with what it gets: the loss, or the class of the optimizer and the norm of its gradients."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self.seen.append(("on_before_backward", loss.requires_grad))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.append(("on_after_backward",))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.seen.append(("on_before_optimizer_step", type(optimizer).__name__, trainer.global_step))

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.seen.append(("on_before_zero_grad", type(optimizer).__name__, trainer.global_step))


def test_callbacks_see_backward_passes_and_optimizer_steps() -> None:
    watcher = UpdateWatcher()
    fit(TrialModule(SmallTrial), max_steps=4, callbacks=[watcher])
    of_first_batch = [
        ("on_before_backward", True),
        ("on_after_backward",),
        ("on_before_optimizer_step", "SGD", 0),
        ("on_before_zero_grad", "SGD", 1),
        ("on_before_optimizer_step", "Adam", 1),
        ("on_before_zero_grad", "Adam", 2),
    ]
    assert watcher.seen[:6] == of_first_batch
    assert watcher.seen[6:] == [
        ("on_before_backward", True),
        ("on_after_backward",),
        ("on_before_optimizer_step", "SGD", 2),
        ("on_before_zero_grad", "SGD", 3),
        ("on_before_optimizer_step", "Adam", 3),
        ("on_before_zero_grad", "Adam", 4),
    ]


@pytest.mark.parametrize("aggregation_frequency", [2, 3])
def test_batches_that_only_aggregate_have_a_backward_pass_and_no_step(aggregation_frequency: int) -> None:
    watcher = UpdateWatcher()
    fit(TrialModule(SmallTrial, aggregation_frequency=aggregation_frequency), callbacks=[watcher])
    names = [name for name, *_ in watcher.seen]
    assert names.count("on_after_backward") == EPOCH_LEN
    assert names.count("on_before_optimizer_step") == 2 * (EPOCH_LEN // aggregation_frequency)


def test_before_a_step_the_gradients_are_averaged_and_clipped() -> None:
    norms: list[float] = []

    class Trial(SmallTrial):
        def loss(self, batch: Any) -> torch.Tensor:
            return 1000 * super().loss(batch)

    class GradientNorm(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
            if isinstance(optimizer, torch.optim.SGD):
                gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
                norms.append(torch.nn.utils.get_total_norm(gradients).item())

    fit(TrialModule(Trial), callbacks=[GradientNorm()])
    assert norms == pytest.approx([1.0] * EPOCH_LEN, rel=1e-4)  # the trial clips those of its SGD to 1


def test_a_subclass_of_the_module_sees_them_too() -> None:
    names: list[str] = []

    class Module(TrialModule):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            names.append("on_before_backward")

        def on_after_backward(self) -> None:
            names.append("on_after_backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            names.append("on_before_optimizer_step")

        def on_before_zero_grad(self, optimizer: Any) -> None:
            names.append("on_before_zero_grad")

    fit(Module(SmallTrial), max_steps=2)
    assert names == [*UPDATE_HOOKS[:2], *UPDATE_HOOKS[2:], *UPDATE_HOOKS[2:]]


@pytest.mark.parametrize("hook", UPDATE_HOOKS)
def test_a_hook_that_is_set_on_an_instance_counts(hook: str) -> None:
    calls: list[str] = []
    lambdas = {hook: lambda trainer, module, *arguments: calls.append(hook)}
    fit(TrialModule(SmallTrial), callbacks=[LambdaCallback(**lambdas)])
    assert len(calls) == EPOCH_LEN * (2 if "optimizer" in hook or "zero" in hook else 1)


def test_hooks_do_not_change_the_weights() -> None:
    plain, watched = TrialModule(SmallTrial), TrialModule(SmallTrial)
    fit(plain, max_epochs=2)
    fit(watched, max_epochs=2, callbacks=[UpdateWatcher()], profiler=SimpleProfiler())
    assert torch.equal(weights_of(plain.trial), weights_of(watched.trial))


def test_profilers_show_backward_passes_and_optimizer_steps() -> None:
    profiler = SimpleProfiler()
    fit(TrialModule(SmallTrial), profiler=profiler)
    assert len(profiler.recorded_durations["run_training_batch"]) == EPOCH_LEN
    assert len(profiler.recorded_durations["backward"]) == EPOCH_LEN
    assert len(profiler.recorded_durations["optimizer_step"]) == 2 * EPOCH_LEN


def test_a_profiler_that_lists_functions_shows_them_too(tmp_path: Path) -> None:
    fit(TrialModule(SmallTrial), profiler=AdvancedProfiler(tmp_path, "profile"))
    report = (tmp_path / "fit-profile.txt").read_text()
    assert "Profile stats for: backward" in report
    assert "Profile stats for: optimizer_step" in report


def test_a_context_forgets_the_hooks_of_a_run() -> None:
    module = TrialModule(SmallTrial)
    watcher = UpdateWatcher()
    fit(module, callbacks=[watcher])
    seen = len(watcher.seen)
    fit(module, max_epochs=2)
    assert len(watcher.seen) == seen
