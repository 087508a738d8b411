"""A trial that gets its hyperparameters as an argument, with the script that trains it, as since 0.21."""

import argparse
import logging
from typing import Any, Dict, Optional

import determined as det
import torch
from determined import core, pytorch
from torch import nn


class DigitsTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, hparams: Optional[Dict]) -> None:
        self.context = context
        self.hparams = hparams
        model = nn.Sequential(nn.Flatten(), nn.Linear(9, hparams["hidden"]), nn.Tanh(), nn.Linear(hparams["hidden"], 3))
        self.model = self.context.wrap_model(model)
        self.optimizer = self.context.wrap_optimizer(torch.optim.Adadelta(self.model.parameters(), lr=hparams["lr"]))
        if hparams.get("amp", False):
            self.context.experimental.use_amp()

    def digits(self, count: int) -> torch.utils.data.TensorDataset:
        labels = torch.arange(count) % 3
        images = torch.zeros(count, 3, 3).scatter_(1, labels[:, None, None].expand(-1, 1, 3), 1.0)
        return torch.utils.data.TensorDataset(images, labels)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.digits(20), batch_size=4)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.digits(7), batch_size=4)

    def train_batch(self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int) -> Dict[str, torch.Tensor]:
        images, labels = batch

        loss = nn.functional.cross_entropy(self.model(images), labels)

        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)

        return {"loss": loss}

    def evaluate_full_dataset(self, data_loader: torch.utils.data.DataLoader) -> Dict[str, Any]:
        right, count = 0, 0
        for images, labels in data_loader:
            images, labels = self.context.to_device(images), self.context.to_device(labels)
            right += (self.model(images).argmax(1) == labels).sum().item()
            count += len(labels)
        return {"accuracy": right / count}


def run(hparams: Dict[str, Any], local: bool) -> DigitsTrial:
    info = det.get_cluster_info()
    latest_checkpoint = None if local else info.latest_checkpoint
    distributed: "core.DistributedContext" = core.DistributedContext(rank=0, size=1, local_rank=0, local_size=1,
                                                                     cross_rank=0, cross_size=1)
    with det.pytorch.init(hparams=hparams, distributed=distributed) as train_context:
        trial = DigitsTrial(train_context, hparams=hparams)
        trainer = det.pytorch.Trainer(trial, train_context)
        trainer.fit(max_length=pytorch.Batch(3), latest_checkpoint=latest_checkpoint, test_mode=True)
    return trial


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=4)
    run({"hidden": parser.parse_args().hidden, "lr": 0.1}, local=det.get_cluster_info() is None)
