"""The hooks of callbacks and of subclasses of TrialModule: called as those of any LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from tests.adapters.training import trained
from tests.lightning import fit, pl
from tests.trials import EPOCH_LEN, SmallTrial, make_data

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
