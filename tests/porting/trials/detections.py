"""Spellings of 0.13 to 0.17: old callbacks, experimental reducers, old import places, calls that are not needed."""

import numpy as np
import torch
from determined.pytorch import DataLoader, PyTorchTrial
from determined.pytorch._callback import PyTorchCallback
from determined.pytorch._lr_scheduler import LRScheduler  # noqa: F401
from determined.tensorboard.metric_writers.pytorch import TorchWriter


def mean_of(values):
    return np.mean(values)


class Reporting(PyTorchCallback):
    def __init__(self):
        self.seen = []

    def on_training_epoch_start(self):
        self.seen.append("epoch")

    def on_validation_step_start(self):
        self.seen.append("start")

    def on_validation_step_end(self, metrics):
        self.seen.append(sorted(metrics))

    def on_checkpoint_end(self, checkpoint_dir):
        self.seen.append(checkpoint_dir)


class DetectionsTrial(PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.writer = TorchWriter()
        self.model = self.context.wrap_model(torch.nn.Linear(2, 1))
        self.optimizer = self.context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.1))
        self.error = self.context.experimental.wrap_reducer(mean_of, name="error", for_training=False)
        self.reporting = Reporting()

    def build_callbacks(self):
        return {"reporting": self.reporting}

    def build_training_data_loader(self):
        return DataLoader(torch.ones(8, 2), batch_size=self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: "torch.Tensor", epoch_idx, batch_idx):
        self.model.train()
        loss = self.model(batch).sum()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        self.model.eval()
        self.error.update(self.model(batch).mean().item())
        return {}
