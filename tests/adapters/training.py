"""Trainings in one call: of a trial, and of a plain module of Lightning with the same model on the same batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from tests.lightning import fit, pl, trainer
from tests.trials import SmallTrial, make_data, weights_of

BATCH_SIZE = 8


class Predicting(SmallTrial):
    def predict_batch(self, batch: Any) -> torch.Tensor:
        prediction: torch.Tensor = self.head(self.body(batch[0]))
        return prediction


def trained(trial: Any = SmallTrial, ckpt_path: Any = None, **flags: Any) -> Any:
    """Train a trial, or the module of one, from the same random state each time; return the module."""
    module = trial if isinstance(trial, TrialModule) else TrialModule(trial)
    fit(module, ckpt_path, **flags)
    return module


def resumes_exactly(checkpoint: Any, epochs: int = 2, trial: Any = SmallTrial) -> bool:
    """Tell whether a run that goes on from a checkpoint ends with the weights of one that never stopped."""
    resumed, straight = trained(trial, checkpoint, max_epochs=epochs), trained(trial, max_epochs=epochs)
    return torch.equal(weights_of(resumed.trial), weights_of(straight.trial))


# A plain module beside a trial


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return torch.as_tensor((model(inputs) - targets).square().mean())


def loader() -> DataLoader[Any]:
    return DataLoader(make_data(), batch_size=BATCH_SIZE)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.trained = self.validated = 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        return loader()

    val_dataloader = train_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained += 1
        loss = loss_of(self.model, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        self.log("validation_loss", loss_of(self.model, batch), batch_size=1)

    test_step = validation_step

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, model: torch.nn.Module | None = None) -> None:
        self.context = context
        self.model = context.wrap_model(model or make_model())
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))
        self.trained = self.validated = 0

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=BATCH_SIZE)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.trained += 1
        loss = loss_of(self.model, batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.sgd)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.validated += 1
        return {"validation_loss": loss_of(self.model, batch)}


@dataclasses.dataclass
class Outcome:
    """What a use ended with; a training metric, which is a mean for a trial, counts by its name only."""

    counts: tuple[int, ...]
    weights: torch.Tensor
    metrics: dict[str, float]
    notes: list[Any]

    def is_like(self, other: Outcome) -> bool:
        same = self.counts == other.counts and self.notes == other.notes and self.metrics.keys() == other.metrics.keys()
        values = [(value, other.metrics.get(name)) for name, value in self.metrics.items() if name != "loss"]
        close = all(abs(one - float(another or 0)) < 1e-4 for one, another in values)
        return same and close and torch.allclose(self.weights, other.weights, atol=1e-6)


Use = Callable[[pl.Trainer, pl.LightningModule, list[Any]], Any]


def fit_only(trainer: pl.Trainer, module: pl.LightningModule, notes: list[Any]) -> None:
    trainer.fit(module)


def outcome(
    is_trial: bool, flags: dict[str, Any], use: Use = fit_only, methods: dict[str, Any] | None = None
) -> Outcome:
    """Return what a use ends with, for a module with more ``methods``, which note things in its ``notes``."""
    notes: list[Any] = []
    base = TrialModule if is_trial else Plain
    module = type("Module", (base,), {**(methods or {}), "notes": notes})(*([Trial] if is_trial else []))
    made = trainer(**{"num_sanity_val_steps": 0, "max_epochs": 3, **flags})
    use(made, module, notes)
    trained: Any = module.trial if is_trial else module
    return Outcome(
        counts=(trained.trained, trained.validated, made.current_epoch, made.global_step),
        weights=torch.cat([parameter.detach().double().flatten() for parameter in trained.model.parameters()]),
        metrics={name: float(value) for name, value in made.callback_metrics.items()},
        notes=notes,
    )
