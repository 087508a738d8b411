"""Trials that use every part of the API train as the modules do that are written of them, or a comment says why not."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from det_lightning.porting.to_lightning import write_module
from tests.porting.side_by_side import assert_equal, train_trial, train_written
from tests.porting.test_trials import load

SOURCE = '''\
import functools
import torch
from determined.pytorch import DataLoader, LRScheduler, MetricReducer, PyTorchCallback, PyTorchTrial, Reducer
from torch import nn
from torch.utils.data import TensorDataset
class Pretrained(nn.Sequential):
    """In evaluation mode when it is made, as models are that come with weights."""
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.eval()
def data(count):
    values = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return TensorDataset(values, values[:, :2] * 2)
def clip(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)
class AttrDict(dict):
    def __getattr__(self, name):
        value = self[name]
        return AttrDict(value) if isinstance(value, dict) else value
class MyTrial(PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(Pretrained())
        self.opt = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr")))
{init}
    def build_training_data_loader(self):
        return DataLoader(data(20), batch_size=self.context.get_per_slot_batch_size())
    def build_validation_data_loader(self):
        return DataLoader(data(12), batch_size=self.context.get_per_slot_batch_size())
    def train_batch(self, batch, epoch_idx, batch_idx):
        x, y = batch
        loss = (self.model(x) - y).pow(2).mean()
{train}
{evaluate}
{rest}
'''
STEP = """
self.context.backward(loss)
self.context.step_optimizer(self.opt)
return {"loss": loss}
"""
EVALUATE = """
def evaluate_batch(self, batch):
    x, y = batch
    return {"error": (self.model(x) - y).abs().mean()}
"""
HPARAMS: dict[str, Any] = {"lr": 0.05, "global_batch_size": 4, "nested": {"momentum": 0.5}, "every": 2}


def trial_source(init: str = "", train: str = STEP, evaluate: str = EVALUATE, rest: str = "") -> str:
    parts = {"init": (init, 8), "train": (train, 8), "evaluate": (evaluate, 4), "rest": (rest, 4)}
    source = SOURCE
    for name, (code, indentation) in parts.items():
        source = source.replace(f"{{{name}}}", textwrap.indent(textwrap.dedent(code).strip("\n"), " " * indentation))
    return source


def train_both(source: str, directory: Path, expected: list[str], **settings: Any) -> None:
    written = write_module(source)
    (directory / "original.py").write_text(source.replace("determined", "det_lightning"))
    (directory / "written.py").write_text(written.text)
    print(written.text)
    theirs = train_trial(load(directory / "original.py").MyTrial, dict(HPARAMS), **settings)
    ours = train_written(load(directory / "written.py").MyModule, dict(HPARAMS))
    assert_equal(ours, theirs)
    assert len(written.todos) == len(expected), written.todos
    for todo, text in zip(written.todos, expected, strict=True):
        assert text in todo.text


def clipping(clip: str) -> dict[str, str]:
    return {"train": STEP.replace("self.opt)", f"self.opt, {clip})")}


#: Parts of a trial by what they are about.
CASES: dict[str, dict[str, str]] = {
    "clip is None": {"init": "self.clip = None", **clipping("clip_grads=self.clip")},
    "clip is chosen": clipping("clip_grads=clip if batch_idx % 2 else None"),
    "clip is a function": clipping("clip"),
    "clip is partial": clipping("functools.partial(torch.nn.utils.clip_grad_value_, clip_value=0.01)"),
    "clip shadows": {
        "train": "x = x\n" + clipping("lambda x: clip(x)")["train"].replace("loss}", 'loss, "n": float(len(x))}')
    },
    "epoch schedule, shuffled data": {
        "init": """
            self.schedule = context.wrap_lr_scheduler(
                torch.optim.lr_scheduler.StepLR(self.opt, 1, 0.5), LRScheduler.StepMode.STEP_EVERY_EPOCH
            )
            """,
        "rest": "def build_training_data_loader(self):\n    return DataLoader(data(20), batch_size=4, shuffle=True)",
    },
    "batch schedule of a hyperparameter": {
        "init": """
            schedule = torch.optim.lr_scheduler.StepLR(self.opt, 1, 0.5)
            self.schedule = schedule
            context.wrap_lr_scheduler(
                schedule, LRScheduler.StepMode.STEP_EVERY_BATCH, frequency=self.context.get_hparam("every")
            )
            """
    },
    "schedules in a list": {
        "init": """
            self.schedules = [
                context.wrap_lr_scheduler(
                    torch.optim.lr_scheduler.StepLR(self.opt, 2, 0.9), LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP
                ),
            ]
            """
    },
    "schedule by hand": {
        "init": """
            self.schedule = context.wrap_lr_scheduler(
                torch.optim.lr_scheduler.StepLR(self.opt, 1, 0.5), LRScheduler.StepMode.MANUAL_STEP
            )
            """,
        "train": "if self.context.is_epoch_start() and batch_idx: self.schedule.step()\n" + STEP,
    },
    "several of both": {
        "init": """
            self.others = torch.nn.ModuleList([context.wrap_model(nn.Linear(4, 2)) for _ in range(2)])
            self.opts = {}
            for i, other in enumerate(self.others):
                self.opts[i] = context.wrap_optimizer(torch.optim.SGD(other.parameters(), lr=0.1))
            """,
        "train": """
            for i, other in enumerate(self.others):
                self.context.backward((other(x) - y).pow(2).mean())
                self.context.step_optimizer(self.opts[i], auto_zero_grads=batch_idx % 2 == 1)
            """
        + STEP.replace("\n", "\n            "),
    },
    "hyperparameters": {
        "init": """
            self.hparams = AttrDict(context.get_hparams())
            self.momentum = self.hparams.nested.momentum
            self.missing = self.context.get_hparams().get("missing", 3)
            """,
        "train": 'loss = loss * self.momentum * self.hparams["nested"]["momentum"] + self.missing\n' + STEP,
    },
    "device, rank and size": {
        "init": """
            self.device = context.device
            self.rank = context.distributed.get_rank()
            self.size = context.distributed.size
            self.per_slot = context.get_per_slot_batch_size()
            """,
        "train": "loss = loss * self.size + self.rank + torch.ones(1, device=self.device).mean() * self.per_slot\n"
        + STEP,
    },
    "position": {
        "train": """
            loss = loss * (1 + self.context.current_train_batch() + self.context.current_train_epoch())
            assert self.context.current_train_batch() == batch_idx and self.context.current_train_epoch() == epoch_idx
            assert self.context.is_epoch_start() == (batch_idx % 5 == 0)
            assert self.context.is_epoch_end() == (batch_idx % 5 == 4)
            """
        + STEP.replace("\n", "\n            "),
    },
    "f-strings": {
        "train": """
            name = f"{self.context.get_global_batch_size()}"
            name += f"{self.context.get_hparam('lr')!r:>{self.context.get_hparam('every')}}"
            name += f'{self.context.get_per_slot_batch_size() * 2} {self.context.distributed.get_rank():03d}'
            loss = loss * len(name)
            """
        + STEP.replace("\n", "\n            "),
    },
    "an alias of the context": {"train": "context = self.context\n" + STEP.replace("self.context", "context")},
    "a function in __init__": {
        "init": """
            def clip_grads(parameters):
                torch.nn.utils.clip_grad_norm_(parameters, context.get_hparam("lr"))

            self.clip_grads = clip_grads
            """,
        "train": STEP.replace("self.opt)", "self.opt, self.clip_grads)"),
    },
    "the full dataset": {
        "evaluate": """
            def evaluate_full_dataset(self, data_loader):
                errors = [(self.model(x) - y).abs().mean() for x, y in data_loader]
                return {"error": sum(errors) / len(errors), "count": len(errors)}
            """
    },
    "reducers": {
        "init": 'self.mean = context.wrap_reducer(lambda values: max(values), name="mean", for_training=False)',
        "evaluate": EVALUATE.replace("return", "self.mean.update(x.sum().item())\n    return"),
    },
    "reduced in other ways": {"rest": 'def evaluation_reducer(self):\n    return {"error": Reducer.MAX}'},
    "to_device and a distributed broadcast": {
        "train": "loss = loss * self.context.to_device(torch.ones(1)).mean()\n"
        "loss = loss * self.context.distributed.broadcast(2)\n" + STEP
    },
}
TODOS = {
    "the full dataset": "move the batches of the loader to self.device here",
    "reducers": "these values are of one process",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_module_trains_as_the_trial_does(name: str, tmp_path: Path) -> None:
    train_both(trial_source(**CASES[name]), tmp_path, [TODOS[name]] if name in TODOS else [])
