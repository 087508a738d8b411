"""A trial as it should be; test_defects.py changes copies of it. It is ported code: it imports determined."""

import os
import random

import numpy as np
import torch
from determined import pytorch

STEPS = 0


class Noted(torch.utils.data.Dataset):
    def __init__(self, samples):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, 3, generator=generator)
        self.reads = 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True)


class Best(pytorch.PyTorchCallback):
    def __init__(self):
        self.best = float("inf")

    def on_validation_end(self, metrics):
        self.best = min(self.best, float(metrics["validation_loss"]))

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state_dict):
        self.best = state_dict["best"]


class MyTrial(pytorch.PyTorchTrial):
    factor = 1.0

    def __init__(self, context):
        self.context = context
        self.best = Best()
        self.body = context.wrap_model(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1)))
        self.head = context.wrap_model(torch.nn.Linear(4, 1))
        self.adam = context.wrap_optimizer(torch.optim.Adam(self.body.parameters(), lr=context.get_hparam("lr")))
        self.sgd = context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9))
        decay = torch.optim.lr_scheduler.ExponentialLR(self.adam, gamma=0.9)
        self.scheduler = context.wrap_lr_scheduler(decay, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)
        self.batch_size = context.get_per_slot_batch_size()

    def build_training_data_loader(self):
        return pytorch.DataLoader(Noted(40), batch_size=self.batch_size, shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(Noted(12), batch_size=4)

    def build_callbacks(self):
        return {"best": self.best}

    def loss(self, batch):
        inputs, targets = batch
        return ((self.head(self.body(inputs)) - targets) ** 2).mean()

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.adam)
        self.context.step_optimizer(self.sgd)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": self.loss(batch)}


# For the changed copies.


_ = os, random


class Mean(pytorch.MetricReducer):
    def __init__(self):
        self.reset()

    def reset(self):
        self.losses = []

    def update(self, loss):
        self.losses.append(loss)

    def per_slot_reduce(self):
        return sum(self.losses), len(self.losses)

    def cross_slot_reduce(self, parts):
        return sum(total for total, _ in parts) / parts[0][1]


class Calling(torch.optim.SGD):
    def step(self, closure=None):
        torch.optim.SGD(self.param_groups[0]["params"], lr=0.1).step()


class Frozen(torch.nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


class Buckets:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return 40 // self.size

    def __iter__(self):
        buckets = np.arange(40).reshape(-1, self.size)
        yield from np.random.default_rng(3).permutation(buckets).tolist()


class Drawing(torch.utils.data.Sampler):
    """Draws another order from the second batch on."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return 40

    def __iter__(self):
        return iter([0, 1, 2, 3, *(self.generator.permutation(36) + 4).tolist()])


def time_first(samples):
    inputs, targets = map(torch.stack, zip(*samples, strict=True))
    return torch.stack([inputs] * 7), targets
