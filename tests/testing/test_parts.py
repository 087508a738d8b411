"""The parts of the plugin that need no training: options, boundaries, and the scan of the source."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from det_lightning.hyperparameters import choose_hparams
from det_lightning.porting.bypass_rules import DEVICE, PROCESSES
from det_lightning.testing.checks import BadTrial
from det_lightning.testing.observation.source_scan import TrialCode
from det_lightning.testing.options import read_config
from det_lightning.testing.records.record import RunSettings
from det_lightning.testing.training.execution import RunPlan
from det_lightning.testing.training.trainings import Boundaries
from det_lightning.testing.training.trial_source import ImportedTrial


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("adam", "adam"),
        ({"type": "const", "val": "x"}, "x"),
        ({"type": "int", "minval": 1, "maxval": 8}, 4),
        ({"type": "double", "minval": 0.0, "maxval": 0.5}, 0.25),
        ({"type": "log", "minval": -4, "maxval": -2, "base": 10}, 0.001),
        ({"type": "categorical", "vals": [16, 32]}, 16),
        ({"lr": {"type": "const", "val": 1}, "name": "sgd"}, {"lr": 1, "name": "sgd"}),
        ({"type": {"type": "const", "val": "a"}}, {"type": "a"}),
    ],
)
def test_hyperparameter_has_one_value(entry: Any, value: Any) -> None:
    assert choose_hparams({"hyperparameters": {"x": entry}}) == {"x": value}


def test_invalid_hyperparameters_are_named() -> None:
    nothing = {"c": {"type": "nothing"}}
    entries = {"a": {"type": "int", "minval": 1}, "b": nothing, "d": {"type": "categorical", "vals": []}}
    with pytest.raises(ValueError, match=r"a lacks 'maxval'; b.c has the unknown type 'nothing' .*; d cannot be read"):
        choose_hparams({"hyperparameters": entries})


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "only text"])
def test_wrong_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "const.yaml").write_text(content)
    with pytest.raises(BadTrial, match=r"--trial-config .*const.yaml"):
        read_config(tmp_path / "const.yaml")


@hypothesis.given(batches=st.integers(6, 60), epoch_length=st.none() | st.integers(1, 100), frequency=st.integers(1, 8))
def test_run_has_every_boundary(batches: int, epoch_length: int | None, frequency: int) -> None:
    boundaries = Boundaries.place(batches, epoch_length)
    settings = RunSettings(batches=batches, aggregation_frequency=frequency)
    plan = boundaries.apply(RunPlan("a run", settings, Path("checkpoints")))
    assert plan.validate_after is not None
    assert all(0 < batch < batches for batch in plan.checkpoint_after | plan.validate_after)
    assert boundaries.after_validation in plan.validate_after & plan.checkpoint_after
    if epoch_length is not None:
        epoch = min(epoch_length, boundaries.epoch_limit or epoch_length)
        assert boundaries.epoch_end == epoch
        assert boundaries.mid_epoch is None if epoch == 1 else boundaries.mid_epoch % epoch  # type: ignore[operator]
    if frequency > 1:
        within = boundaries.mid_aggregation(frequency)
        assert within is not None and within % frequency and within in plan.checkpoint_after


SOURCE = """
import os, torch
import torch.distributed as dist

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if torch.cuda.is_available():
    torch.cuda.manual_seed(1)
    torch.nn.Linear(1, 1).cuda()
if torch.cuda.device_count() > 0 or ones.is_cuda:
    torch.nn.Linear(1, 1).cuda()
name = torch.device("cuda" if device.type == "cuda" else "cpu")
there = torch.ones(1).cuda(ones.device)
use_cuda = torch.cuda.is_available() and not os.environ.get("NO_CUDA")
Tensor = torch.cuda.FloatTensor if use_cuda else torch.FloatTensor
ones = torch.ones(1).to(device)
here = torch.ones(1, device="cuda:1")
loaded = torch.load("x.pt", map_location="cuda:0")
there = torch.ones(1).to("cuda")
kind = ones.type(torch.cuda.FloatTensor)
torch.cuda.set_device(0)


class Trial:
    def __init__(self, context):
        self.width = context.get_hparam("width")
        self.size = context.get_per_slot_batch_size()
        context.distributed.allgather(1)
        context.distributed.broadcast(1)
        samplers.DistributedSampler(self, 2, 0)
        DistributedSampler(self, num_workers=2, rank=0)
        dist.all_reduce(ones)
        if dist.is_initialized():
            torch.nn.parallel.DistributedDataParallel(self)


def main():
    dist.init_process_group("nccl")
    torch.nn.Linear(1, 1).cuda()


if __name__ == "__main__":
    main()
"""


def test_scan_finds_bypasses_and_hyperparameters(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(SOURCE)
    code = TrialCode([tmp_path / "model_def.py"], tmp_path)
    assert code.find_bypasses(DEVICE) == [
        "model_def.py:16: torch.ones(1, device='cuda:1')",
        "model_def.py:17: torch.load('x.pt', map_location='cuda:0')",
        "model_def.py:18: torch.ones(1).to('cuda')",
        "model_def.py:19: torch.cuda.FloatTensor",
        "model_def.py:20: torch.cuda.set_device(0)",
    ]
    assert code.find_bypasses(PROCESSES) == [
        "model_def.py:31: dist.all_reduce(ones)",
        "model_def.py:33: torch.nn.parallel.DistributedDataParallel(self)",
    ]
    assert code.find_hparams() == {"width": "model_def.py:25", "global_batch_size": "model_def.py:26"}


REMARKS = """
import torch

class MyTrial:
    def __init__(self, context):
        self.means = torch.zeros(3)
        self.moved = torch.zeros(3).to(context.device)
        self.scale = torch.tensor(2.0)
        self.classes = torch.arange(10)
        self.context = context

    def evaluate_batch(self, batch, batch_idx):
        return {} if batch_idx == 0 else {"classes": self.classes.tolist()}

    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == len(self.loader) - 1 or batch_idx % len(self.loader) == 0:
            batch = batch - self.means * self.moved * self.scale
        self.context.step_optimizer(self.optimizer)
        self.weight.grad.clamp_(-1, 1)
        self.weight.grad.zero_()
        self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad.detach().clone().mul_(2)
        self.weight.grad.norm().clamp_(max=1)
        self.weight.grad.data[0].mul_(2)
"""


def test_scan_finds_remarks(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(REMARKS)
    code = TrialCode([tmp_path / "model_def.py"], tmp_path)
    assert code.find_unmoved() == ["model_def.py:6: self.means = torch.zeros(3)"]
    assert code.find_counts_in_epoch() == ["model_def.py:16: batch_idx == len(self.loader) - 1"]
    assert code.find_late_changes() == [
        "model_def.py:19: self.weight.grad.clamp_(-1, 1)",
        "model_def.py:24: self.weight.grad.data[0].mul_(2)",
    ]


def test_each_import_is_fresh(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("values = []\n")
    (tmp_path / "model_def.py").write_text(
        "import os, counted\nfrom determined import pytorch\ncounted.values.append(1)\nos.environ['LEFT'] = 'behind'\n"
        "class MyTrial(pytorch.PyTorchTrial):\n    values = counted.values\n"
    )
    trial = ImportedTrial("model_def.py:MyTrial", tmp_path)
    search_path = list(sys.path)
    for _ in range(2):
        with trial.import_class() as trial_class:
            assert trial_class.values == [1]  # type: ignore[attr-defined]
            assert {module.__name__ for module in trial.modules()} == {"model_def", "counted"}
    assert trial.modules() == []
    assert sys.path == search_path


def test_single_import_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "registered_times", 0, raising=False)
    (tmp_path / "model_def.py").write_text(
        "import sys\nfrom determined import pytorch\nif sys.registered_times:\n"
        "    raise RuntimeError('registered already')\nsys.registered_times += 1\n"
        "class MyTrial(pytorch.PyTorchTrial):\n    pass\n"
    )
    trial = ImportedTrial("model_def:MyTrial", tmp_path)
    with trial.import_class() as first:
        pass
    with trial.import_class() as second:
        assert first is second
