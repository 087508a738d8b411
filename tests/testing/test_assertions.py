"""The functions for your own tests of trials."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.testing import assert_resumes, assert_same_training, run_trial
from tests.trials import SmallTrial

pytest_plugins = ["pytester"]

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "testing.md"

#: What the examples of the documentation take for granted.
PREAMBLE = """
import torch
from det_lightning import pytorch

HPARAMS = {"lr": 0.1, "global_batch_size": 8}


class MyTrial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Sequential(torch.nn.Linear(2, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), context.get_hparam("lr")))

    def make_loader(self):
        inputs = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    build_training_data_loader = build_validation_data_loader = make_loader

    def evaluate_batch(self, batch):
        return {"loss": ((self.model(batch[0]) - batch[1]) ** 2).mean()}

    def train_batch(self, batch, epoch_idx, batch_idx):
        metrics = self.evaluate_batch(batch)
        self.context.backward(metrics["loss"])
        self.context.step_optimizer(self.optimizer)
        return metrics


class MyRefactoredTrial(MyTrial):
    pass

"""


class Forgetful(SmallTrial):
    """Counts batches, and trains by the count."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.seen = 0

    def loss(self, batch: Any) -> torch.Tensor:
        self.seen += 1
        return super().loss(batch) * (1 + 0.1 * self.seen)


class Sized(SmallTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, width: int) -> None:
        super().__init__(context)
        self.width = width * context.get_hparam("scale")

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"width": self.width}


def test_run_shows_its_results() -> None:
    run = run_trial(SmallTrial, batches=5, validate_after=3)
    assert [metrics["batch"] for metrics in run.metrics] == [0, 1, 2, 3, 4]
    assert run.metrics[0]["loss"].shape == ()
    assert [batches for batches, _ in run.validations] == [3, 5]
    assert set(run.validations[0][1]) == {"validation_loss"}
    assert run.weights["body.0.weight"].shape == (8, 4)
    assert run.learning_rates[0] == [0.01, 0.02]
    assert run.events[:3] == ["on_training_epoch_start", "batch", "batch"]
    assert run.events.count("batch") == 5
    assert run.state["callback"] == {"counter": {"epochs": 0}}


def test_trial_gets_hparams_and_arguments() -> None:
    run = run_trial(Sized, hparams={"scale": 3}, arguments={"width": 5}, batches=1)
    assert run.validations == [(1, {"width": 15.0})]
    with pytest.raises(ValueError, match="no hyperparameter 'scale'"):
        run_trial(Sized, hparams={}, arguments={"width": 5}, batches=1)


class Lazy(SmallTrial):
    """Has a layer that has no shape until the first forward pass."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.lazy = context.wrap_model(torch.nn.LazyLinear(1))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + 0 * self.lazy(torch.ones(1, 3)).sum()


def test_lazy_layers_train() -> None:
    assert run_trial(Lazy, batches=2).weights["lazy.weight"].shape == (1, 3)


def test_seed_decides_the_training() -> None:
    before = torch.get_rng_state()
    first, second, other = (run_trial(SmallTrial, batches=4, seed=seed) for seed in (5, 5, 6))
    assert_same_training(first, second)
    message = r"first difference is the data batch\[0\].* at batch 0: .* in the first, .* in the second"
    with pytest.raises(AssertionError, match=message):
        assert_same_training(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_resume_needs_the_whole_state() -> None:
    assert_resumes(SmallTrial)
    with pytest.raises(AssertionError, match=r"(?s)metric loss at batch 2: .*not in the checkpoint: trial .*: seen"):
        assert_resumes(Forgetful)


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 6; got 5"):
        assert_resumes(SmallTrial, batches=5)


@pytest.mark.slow
def test_examples_of_the_page_run(pytester: pytest.Pytester) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    pytester.makepyfile(PREAMBLE + example)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=3)
