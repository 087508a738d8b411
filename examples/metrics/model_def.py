"""A small network that tells from thirty measurements whether a tumour is malignant."""

from typing import Any

import torch
from metric import SensitivityAtSpecificity
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryCalibrationError

from det_lightning import pytorch

HELD_OUT = 189  # of 569


def load_split() -> tuple[TensorDataset, TensorDataset]:
    """Return 380 cases for training and 189 for validation, always the same ones: measurements, and 1 if malignant."""
    values, is_benign = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    measurements = torch.tensor(values, dtype=torch.float32)[order]
    is_malignant = 1 - torch.tensor(is_benign, dtype=torch.float32)[order]
    kept = measurements[HELD_OUT:]
    scaled = (measurements - kept.mean(dim=0)) / kept.std(dim=0)
    return (
        TensorDataset(scaled[HELD_OUT:], is_malignant[HELD_OUT:]),
        TensorDataset(scaled[:HELD_OUT], is_malignant[:HELD_OUT]),
    )


class TumourTrial(pytorch.PyTorchTrial):
    """Hyperparameters: ``lr``, ``hidden``, ``specificity``, ``global_batch_size``."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        hidden = context.get_hparam("hidden")
        self.model = context.wrap_model(nn.Sequential(nn.Linear(30, hidden), nn.ReLU(), nn.Linear(hidden, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr")))
        self.training_set, self.validation_set = load_split()
        # A collection has the names of its members, and no name of its own.
        self.of_torchmetrics = context.wrap_reducer(
            MetricCollection(
                {"accuracy": BinaryAccuracy(), "auroc": BinaryAUROC(), "calibration_error": BinaryCalibrationError()}
            ),
            for_training=False,
        )
        # So does a reducer that returns several metrics.
        self.sensitivity = context.wrap_reducer(
            SensitivityAtSpecificity(context.get_hparam("specificity")), for_training=False
        )

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.training_set, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.validation_set, batch_size=50)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        measurements, is_malignant = batch
        loss = binary_cross_entropy_with_logits(self.model(measurements).squeeze(1), is_malignant)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        measurements, is_malignant = batch
        logits = self.model(measurements).squeeze(1)
        self.of_torchmetrics.update(logits.sigmoid(), is_malignant.int())
        self.sensitivity.update(logits.sigmoid(), is_malignant)
        return {"validation_loss": binary_cross_entropy_with_logits(logits, is_malignant)}
