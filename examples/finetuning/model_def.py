"""A pretrained transformer is fine-tuned to tell praise from blame, with a few labelled reviews."""

from typing import Any

import torch
from encoder import TinyEncoder, pretrain
from reviews import LABELLED, make_reviews
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from det_lightning import pytorch


class ReviewTrial(pytorch.PyTorchTrial):
    """Hyperparameters: ``pretraining_steps``, ``width``, ``layers``, ``lr``, ``encoder_lr``, ``global_batch_size``."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        encoder = TinyEncoder(context.get_hparam("width"), context.get_hparam("layers"))
        # In a project of yours this would read weights from a file or a hub.
        pretrain(encoder, context.get_hparam("pretraining_steps"))
        self.encoder = context.wrap_model(encoder)
        self.head = context.wrap_model(nn.Linear(context.get_hparam("width"), 2))
        groups = [
            {"params": self.encoder.parameters(), "lr": context.get_hparam("encoder_lr")},
            {"params": self.head.parameters(), "lr": context.get_hparam("lr")},
        ]
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(groups))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        labelled = TensorDataset(*make_reviews(64, seed=1, adjectives=slice(LABELLED)))
        return pytorch.DataLoader(labelled, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        unseen = TensorDataset(*make_reviews(400, seed=2, adjectives=slice(LABELLED, None)))
        return pytorch.DataLoader(unseen, batch_size=100)

    def predict(self, reviews: torch.Tensor) -> torch.Tensor:
        """Return logits ``(batch, 2)`` for blame and praise."""
        logits: torch.Tensor = self.head(self.encoder(reviews).mean(dim=1))
        return logits

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        reviews, labels = batch
        loss = cross_entropy(self.predict(reviews), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        reviews, labels = batch
        logits = self.predict(reviews)
        return {
            "validation_loss": cross_entropy(logits, labels),
            "accuracy": (logits.argmax(dim=1) == labels).float().mean(),
        }
