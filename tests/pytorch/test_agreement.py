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
    def __init__(self, context, case):
        self.context = context
        torch.manual_seed(0)
        self.other = context.distributed.rank == 1 and case
        kind = Partly if case == "unused" else torch.nn.Linear
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


def train(case):
    settings = {"strategy": "trial_ddp_find_unused_parameters_true"} if sys.argv[2:] and case == "unused" else {}
    with det.pytorch.init(hparams={"global_batch_size": 2}, enable_tensorboard_logging=False, **settings) as context:
        try:
            trial = MyTrial(context, case)
            det.pytorch.Trainer(trial, context, enable_progress_bar=False).fit(max_length=det.pytorch.Batch(4))
            torch.save(trial.model.state_dict(), f"{case}-{context.distributed.rank}.pt")
        except det.errors.InvalidExperimentException as error:
            if not sys.argv[2:]:
                raise
            print(error)


for case in sys.argv[1:]:
    train(case)
"""


def run(folder: Path, *cases: str, launcher: list[str]) -> tuple[int, str]:
    """Train each case, one after another; the error of a single one ends the script."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    command = [start_warm_python().executable, *launcher, "train.py", *cases]
    with (folder / "output.txt").open("w") as output:
        done = subprocess.run(command, cwd=folder, env=environment(), stdout=output, stderr=output, timeout=240)
    return done.returncode, (folder / "output.txt").read_text()


def test_ranks_agree_on_all_parts(tmp_path: Path) -> None:
    status, output = run(tmp_path / "two", "equal", "unused", "model", "shape", "optimizer", launcher=TORCHRUN)
    assert status == 0, output
    assert "rank 0 trains 1 model(s)" in output and "rank 1 wraps model 1, a Linear" in output
    assert "rank 0 wraps model 0, a Linear with 3 weights; rank 1 wraps model 0, a Linear with 9 weights" in output
    assert "rank 0 trains 1 model(s), 1 optimizer(s)" in output
    assert "rank 1 trains 1 model(s), 2 optimizer(s)" in output
    status, output = run(tmp_path / "one", "equal", "unused", launcher=[])
    assert status == 0, output
    for case in ("equal", "unused"):
        first, second = (torch.load(tmp_path / "two" / f"{case}-{rank}.pt") for rank in (0, 1))
        for name, weights in torch.load(tmp_path / "one" / f"{case}-0.pt").items():
            assert torch.equal(first[f"module.{name}"], second[f"module.{name}"])
            torch.testing.assert_close(first[f"module.{name}"], weights)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            "unused",
            ["1 parameters of a Partly got no gradient in a batch", "ranks wait for them: bias. Freeze", "_true'"],
        ),
        ("metric", ["['loss'] on rank 0, and 4 times ['its_own'] on rank 1"]),
        ("validation", ["['loss'] on rank 0, and ['its_own'] on rank 1"]),
    ],
)
def test_ranks_that_disagree_are_named(other: str, said: list[str], tmp_path: Path) -> None:
    status, output = run(tmp_path / other, other, launcher=TORCHRUN)
    assert status != 0
    for part in said:
        assert part in output, output[-4000:]
