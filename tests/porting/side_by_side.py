"""A trial and the module that is written of it, trained alike, and compared."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import det_lightning as det
from det_lightning.adapters import TrialModule

EPOCHS = 2
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@dataclasses.dataclass
class Training:
    """What a training leaves; ``losses`` and learning ``rates`` are those of each batch."""

    losses: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    weights: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Recorder(pl.Callback):
    """Records what is logged as the loss of each batch, and the learning rates that it was trained with."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.training.rates += rates_of(trainer.optimizers)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.training.losses.append(trainer.callback_metrics["loss"].item())


def rates_of(optimizers: list[torch.optim.Optimizer]) -> list[float]:
    return [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]


def train_trial(kind: Any, hparams: dict[str, Any], **settings: Any) -> Training:
    """Train a trial with TrialModule; ``settings`` are those of its context."""
    training = Training()

    class Recorded(kind):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            training.rates += rates_of(context.optimizers)
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            loss = metrics["loss"] if isinstance(metrics, dict) else metrics
            training.losses.append(loss.item())
            return metrics

    seed()
    context = det.pytorch.PyTorchTrialContext(
        hparams=hparams, exp_conf={"data": hparams.get("data")}, enable_tensorboard_logging=False, **settings
    )
    trial = Recorded(context)
    trainer = pl.Trainer(max_epochs=EPOCHS, **QUIET)
    trainer.fit(TrialModule(trial, context=context))
    training.metrics = {name.removeprefix("val_"): value.item() for name, value in trainer.callback_metrics.items()}
    training.weights = [value.clone() for model in context.models for value in model.state_dict().values()]
    return training


def train_written(kind: Any, hparams: dict[str, Any], **settings: Any) -> Training:
    """Train a written module with Lightning alone; ``settings`` are those of its trainer."""
    training = Training()
    seed()
    trainer = pl.Trainer(
        max_epochs=EPOCHS, num_sanity_val_steps=0, callbacks=[Recorder(training)], **{**QUIET, **settings}
    )
    module = kind(**hparams)
    trainer.fit(module)
    training.metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    training.weights = [value.clone() for value in module.state_dict().values()]
    return training


def assert_equal(ours: Training, theirs: Training) -> None:
    """Require the same to the bit, but for the metrics of validations, whose means are rounded in another order."""
    assert len(ours.losses) >= 2 * EPOCHS
    assert ours.losses == theirs.losses
    assert ours.rates == theirs.rates
    assert len(ours.weights) == len(theirs.weights)
    assert all(torch.equal(our, their) for our, their in zip(ours.weights, theirs.weights, strict=True))
    for metric in ours.metrics.keys() & theirs.metrics.keys() - {"loss", "g_loss", "d_loss"}:
        assert ours.metrics[metric] == pytest.approx(theirs.metrics[metric], rel=1e-6)
