"""The hooks of callbacks and of subclasses of TrialModule: called as those of any LightningModule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from tests.lightning import pl
from tests.trials import EPOCH_LEN, SmallTrial, make_data, seed_everything, weights_of

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


def test_callbacks_see_updates() -> None:
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
def test_aggregating_batches_do_not_step(aggregation_frequency: int) -> None:
    watcher = UpdateWatcher()
    fit(TrialModule(SmallTrial, aggregation_frequency=aggregation_frequency), callbacks=[watcher])
    names = [name for name, *_ in watcher.seen]
    assert names.count("on_after_backward") == EPOCH_LEN
    assert names.count("on_before_optimizer_step") == 2 * (EPOCH_LEN // aggregation_frequency)


def test_gradients_before_a_step() -> None:
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


def test_a_subclass_sees_updates() -> None:
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
def test_hooks_on_an_instance_count(hook: str) -> None:
    calls: list[str] = []
    lambdas = {hook: lambda trainer, module, *arguments: calls.append(hook)}
    fit(TrialModule(SmallTrial), callbacks=[pl.callbacks.LambdaCallback(**lambdas)])
    assert len(calls) == EPOCH_LEN * (2 if "optimizer" in hook or "zero" in hook else 1)


def test_hooks_do_not_change_the_weights() -> None:
    plain, watched = TrialModule(SmallTrial), TrialModule(SmallTrial)
    fit(plain, max_epochs=2)
    fit(watched, max_epochs=2, callbacks=[UpdateWatcher()], profiler=pl.profilers.SimpleProfiler())
    assert torch.equal(weights_of(plain.trial), weights_of(watched.trial))


def test_profilers_show_updates() -> None:
    profiler = pl.profilers.SimpleProfiler()
    fit(TrialModule(SmallTrial), profiler=profiler)
    assert len(profiler.recorded_durations["run_training_batch"]) == EPOCH_LEN
    assert len(profiler.recorded_durations["backward"]) == EPOCH_LEN
    assert len(profiler.recorded_durations["optimizer_step"]) == 2 * EPOCH_LEN


def test_the_advanced_profiler_shows_updates(tmp_path: Path) -> None:
    fit(TrialModule(SmallTrial), profiler=pl.profilers.AdvancedProfiler(tmp_path, "profile"))
    report = (tmp_path / "fit-profile.txt").read_text()
    assert "Profile stats for: backward" in report
    assert "Profile stats for: optimizer_step" in report


def test_hooks_end_with_the_run() -> None:
    module = TrialModule(SmallTrial)
    watcher = UpdateWatcher()
    fit(module, callbacks=[watcher])
    seen = len(watcher.seen)
    fit(module, max_epochs=2)
    assert len(watcher.seen) == seen


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
    watcher = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, *rest: seen.append(outputs)
    )
    fit(TrialModule(Trial), max_steps=2, callbacks=[watcher])
    assert [list(outputs) for outputs in seen] == [["loss", "tensor"]]
    assert seen[0]["loss"] == loss
    assert seen[0]["tensor"].requires_grad


def test_a_single_tensor_is_the_loss() -> None:
    class Trial(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return super().train_batch(batch, epoch_idx, batch_idx)["loss"]

    losses: list[torch.Tensor] = []
    watcher = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, *rest: losses.append(outputs["loss"])
    )
    fit(TrialModule(Trial), callbacks=[watcher])
    assert len(losses) == EPOCH_LEN
    assert not any(loss.requires_grad for loss in losses)


def test_a_hook_changes_a_batch() -> None:
    class Trial(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            assert batch[0].sum() == 0
            return super().train_batch(batch, epoch_idx, batch_idx)

    watcher = pl.callbacks.LambdaCallback(
        on_train_batch_start=lambda trainer, module, batch, batch_idx: batch[0].zero_()
    )
    fit(TrialModule(Trial), callbacks=[watcher])


def test_hooks_get_the_batch_after_a_resume(tmp_path: Path) -> None:
    def watching(seen: list[Any]) -> pl.callbacks.LambdaCallback:
        return pl.callbacks.LambdaCallback(
            on_train_batch_start=lambda trainer, module, batch, index: seen.append((index, batch[1]))
        )

    straight: list[Any] = []
    fit(TrialModule(SmallTrial), max_epochs=2, callbacks=[watching(straight)])
    checkpoints = DeterminedCheckpoint(tmp_path / "checkpoints", policy="none", code_dir=tmp_path)
    fit(TrialModule(SmallTrial), max_epochs=-1, max_steps=6, callbacks=[checkpoints])
    resumed: list[Any] = []
    module = TrialModule(SmallTrial)
    pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, callbacks=[watching(resumed)]
    ).fit(module, ckpt_path=checkpoints.last_checkpoint_path)
    assert [index for index, _ in resumed] == [3, 4, 5, 6, *range(EPOCH_LEN)]
    for (_, targets), (_, expected) in zip(resumed, straight[3:], strict=True):
        assert torch.equal(targets, expected)


def test_hooks_without_a_length() -> None:
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

    class Watcher(pl.Callback):
        def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, index: int, _: int = 0) -> None:
            seen.append((index, len(batch[0])))

        def on_validation_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int, _: int = 0
        ) -> None:
            seen.append((index, list(outputs)))

    fit(TrialModule(Trial), callbacks=[Watcher()])
    assert seen == [
        entry for index, size in enumerate([16, 16, 16, 2]) for entry in [(index, size), (index, ["validation_loss"])]
    ]


def test_a_skipped_batch_comes_again() -> None:
    seen: list[int] = []

    class Module(TrialModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            seen.append(batch_idx)
            return -1 if len(seen) == 3 else None

    module = Module(SmallTrial)
    fit(module, max_epochs=2)
    assert seen[:4] == [0, 1, 2, 2]


@pytest.mark.parametrize("on_epoch", [None, True])
@pytest.mark.parametrize(
    "hook",
    [
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        *UPDATE_HOOKS,
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
    ],
)
def test_a_module_logs_from_any_hook(hook: str, on_epoch: bool | None) -> None:
    def log(trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
        module.log("value", 0.25, on_epoch=on_epoch)

    watcher = pl.callbacks.LambdaCallback(**{hook: log})
    trainer = fit(TrialModule(SmallTrial), max_steps=6, callbacks=[watcher], val_check_interval=2)
    assert trainer.callback_metrics["value"] == 0.25


def test_epoch_means_count_samples() -> None:
    class Trial(SmallTrial):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(make_data(), batch_size=40)

    class Module(TrialModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("index", float(batch_idx), on_epoch=True)

    assert fit(Module(Trial)).callback_metrics["index"] == pytest.approx(10 / 50)
