"""Checkpoints for tests of what reads them, most made without training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from det_lightning import pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, ResumeState, TrialState
from det_lightning.checkpoint.format.layout import read_json
from tests.trials import SmallTrial, fit_trial, seed_everything, weights_of

LOAD_DATA = {
    "trial_type": "PyTorchTrial",
    "experiment_config": {"name": "digits"},
    "hparams": {"lr": 0.1, "kind": "adam"},
    "trial_cls_spec": "model_def:DigitsTrial",
    "is_trainer": True,
}


def make_state() -> dict[str, Any]:
    """Return the state of two models, of which one was trained, as ``state_dict.pth`` holds it."""
    torch.manual_seed(1)
    body, head = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)), torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(body.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    head(body(torch.randn(5, 4))).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "models_state_dict": [body.state_dict(), head.state_dict()],
        "optimizers_state_dict": [optimizer.state_dict()],
        "lr_schedulers_state_dict": [scheduler.state_dict()],
        "callbacks": {"counter": {"epochs": 2, "seen": np.arange(3)}},
        "rng_state": {
            "cpu_rng_state": torch.get_rng_state(),
            "np_rng_state": np.random.get_state(),
            "random_rng_state": random.getstate(),
        },
    }


def make_resume(steps: int = 7) -> ResumeState:
    """Return what an exact resume needs, of a single rank."""
    return ResumeState(
        trial_state=dict(vars(TrialState(batches_trained=steps, last_ckpt=steps, epochs_trained=2, last_val=5))),
        rng_states=[{"cpu_rng_state": torch.zeros(3, dtype=torch.uint8)}],
        journals=[[{"first_batch": 0, "rng": {"np": torch.zeros(2)}, "samplers": []}]],
        optimizer_steps=2 * steps,
        gradients=[{"0.bias": torch.ones(3)}, {}],
        settings={"hparams": LOAD_DATA["hparams"], "experiment_config": None},
    )


def make_files(steps: int = 7, by_determined: bool = False, **changes: Any) -> CheckpointContent:
    """Return the content of a checkpoint, changed, without what Determined does not write if ``by_determined``."""
    trial_state = TrialState(batches_trained=steps, last_ckpt=steps, epochs_trained=2, last_val=5)
    content: dict[str, Any] = {
        "state": make_state(),
        "trial_state": trial_state,
        "load_data": LOAD_DATA,
        "resume": None if by_determined else make_resume(steps),
    }
    return CheckpointContent(**{**content, **changes})


def write_checkpoint(root: str | Path, steps: int = 7, by_determined: bool = False, **changes: Any) -> Path:
    """Write a checkpoint with two files of code into a local storage, and return its directory."""
    code = Path("code_of_the_trial")
    (code / "package").mkdir(parents=True, exist_ok=True)
    for file in (code / "model_def.py", code / "package" / "__init__.py"):
        file.write_text("# code\n")
    files = make_files(steps, by_determined, **changes)
    directory = Path(root) / CheckpointStorage(root).write(files, code=code)
    if by_determined:
        forget_checksums(directory)
    return directory


def fit(storage: Path, batches: int, **kwargs: Any) -> torch.Tensor:
    """Train a ``SmallTrial`` up to a number of batches, and write a checkpoint at the end; return the weights."""
    seed_everything()
    length = pytorch.Batch(batches)
    return weights_of(fit_trial(hparams={"lr": 0.1}, max_length=length, checkpoint_storage=storage, **kwargs))


def train(
    storage: Any,
    length: int,
    latest: str | None = None,
    callback: pytorch.PyTorchCallback | None = None,
    trial: type[SmallTrial] = SmallTrial,
    seed: int = 3,
    **writing: Any,
) -> SmallTrial:
    """Train with a checkpoint after each second batch, and none because of a validation; return the trial."""

    class Trial(trial):  # type: ignore[misc, valid-type]
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {**super().build_callbacks(), **({} if callback is None else {"callback": callback})}

    seed_everything(seed)
    trained: SmallTrial = fit_trial(
        Trial,
        hparams={},
        max_length=pytorch.Batch(length),
        validation_period=pytorch.Batch(2) if "metric" in writing else None,
        checkpoints=DeterminedCheckpoint(storage, **{"policy": "none", "period": pytorch.Batch(2), **writing}),
        latest_checkpoint=latest,
    )
    return trained


def forget_checksums(checkpoint: Path) -> None:
    """Leave ``metadata.json`` as Determined writes it, so that a changed file is looked into."""
    metadata = read_json(checkpoint / "metadata.json")
    kept = ("determined_version", "steps_completed", "framework", "format")
    (checkpoint / "metadata.json").write_text(json.dumps({name: metadata[name] for name in kept}))


def assert_equal(one: Any, other: Any) -> None:
    """Compare nested states to the bit, types of containers included; an ``OrderedDict`` counts as a dict."""
    if isinstance(one, dict):
        assert isinstance(other, dict)
        assert list(one) == list(other)
        for name in one:
            assert_equal(one[name], other[name])
        return
    assert type(one) is type(other)
    if isinstance(one, ResumeState):
        assert_equal(vars(one), vars(other))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(one, torch.Tensor):
        assert one.requires_grad == other.requires_grad
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other or (one != one and other != other)
