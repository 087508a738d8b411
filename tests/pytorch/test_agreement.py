"""A user's script under torchrun: ``init()`` connects the ranks, and says what they do not agree on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.launching import TORCHRUN, environment
from tests.warm_python import start_warm_python

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
import det_lightning as det


class Partly(torch.nn.Linear):
    # Leaves its bias out in every other batch.

    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs) if self.calls % 2 else inputs @ self.weight.T


class MyTrial(det.pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        torch.manual_seed(0)
        self.other = context.distributed.rank == 1 and sys.argv[1]
        kind = Partly if sys.argv[1] == "unused" else torch.nn.Linear
        self.model = context.wrap_model(kind(2, 3 if self.other == "shape" else 1))
        if self.other == "model":
            context.wrap_model(torch.nn.Linear(2, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        if self.other == "optimizer":
            context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build_training_data_loader(self):
        data = torch.arange(16.0).reshape(8, 2)
        return det.pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"its_own" if self.other == "metric" else "loss": loss}

    def evaluate_batch(self, batch):
        return {"its_own" if self.other == "validation" else "loss": self.model(batch).mean()}


settings = {"strategy": sys.argv[2]} if sys.argv[2:] else {}
with det.pytorch.init(hparams={"global_batch_size": 2}, enable_tensorboard_logging=False, **settings) as context:
    trial = MyTrial(context)
    det.pytorch.Trainer(trial, context, enable_progress_bar=False).fit(max_length=det.pytorch.Batch(4))
    torch.save(trial.model.state_dict(), f"weights-{context.distributed.rank}-of-{context.distributed.size}.pt")
"""


def start(folder: Path, *arguments: str, launcher: list[str]) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    command = [start_warm_python().executable, *launcher, "train.py", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.parametrize("arguments", [("",), ("unused", "trial_ddp_find_unused_parameters_true")])
def test_a_script_trains_on_all_of_torchruns_ranks(arguments: tuple[str, ...], tmp_path: Path) -> None:
    several = start(tmp_path / "two", *arguments, launcher=TORCHRUN)
    alone = start(tmp_path / "one", *arguments, launcher=[])
    for process in (several, alone):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    first, second = (torch.load(tmp_path / "two" / f"weights-{rank}-of-2.pt") for rank in (0, 1))
    expected = torch.load(tmp_path / "one" / "weights-0-of-1.pt")
    for name, weights in expected.items():
        key = f"module.{name}"
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], weights)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("model", ["rank 0 trains 1 model(s)", "rank 1 wraps model 1, a Linear"]),
        ("shape", ["its weight has the shape (1, 2) on rank 0, and its weight (3, 2) on rank 1"]),
        ("optimizer", ["rank 0 trains 1 model(s), 1 optimizer(s)", "rank 1 trains 1 model(s), 2 optimizer(s)"]),
        (
            "unused",
            ["1 parameters of a Partly got no gradient in a batch", "all ranks wait for them: bias. Freeze", "_true'"],
        ),
        ("metric", ["['loss'] on rank 0, and 4 times ['its_own'] on rank 1"]),
        ("validation", ["['loss'] on rank 0, and ['its_own'] on rank 1"]),
    ],
)
def test_ranks_that_disagree_are_named(other: str, said: list[str], tmp_path: Path) -> None:
    output, _ = (process := start(tmp_path / other, other, launcher=TORCHRUN)).communicate(timeout=120)
    assert process.returncode != 0
    for part in said:
        assert part in output, output[-4000:]
