"""Functions for your own tests of trials."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch

from det_lightning.testing.checks import CheckFailed, NotCompared
from det_lightning.testing.checks.checkpoints import after_validation, epoch_end, mid_aggregation, mid_epoch
from det_lightning.testing.options import MIN_BATCHES, TrialOptions
from det_lightning.testing.training.execution import Run, compare_runs, train
from det_lightning.testing.training.trainings import TrialRuns
from det_lightning.testing.training.trial_source import GivenTrial

# The hooks that TrainedTrial.events shows.
_HOOKS = ("on_training_epoch_start", "on_training_epoch_end", "on_training_workload_end", "on_validation_start",
          "on_checkpoint_save_start", "on_checkpoint_upload_end")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TrainedTrial:
    """A finished training and its results, returned by :func:`run_trial`.

    Attributes:
        run: all observations, for :func:`assert_same_training`.

    Example:
        >>> from det_lightning.testing import run_trial
        >>> from model_def import MyTrial
        >>> trained = run_trial(MyTrial, hparams={"lr": 0.1, "global_batch_size": 8}, batches=2)
        >>> trained.learning_rates  # of Adam and of SGD
        [[0.1, 0.05], [0.1, 0.05]]
        >>> trained.weights["head.weight"].shape
        torch.Size([1, 4])
    """

    run: Run

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each batch, as numpy values."""
        return self.run.observer.metrics

    @property
    def learning_rates(self) -> list[list[float]]:
        """The learning rates of all parameter groups of all optimizers before each batch."""
        events = self.run.record.select("batch_start")
        return [[rate for rates in event["learning_rates"] for rate in rates] for event in events]

    @property
    def validations(self) -> list[tuple[int, dict[str, Any]]]:
        """For each validation, the number of batches trained before, and the metrics."""
        return self.run.observer.validations

    @property
    def events(self) -> list[str]:
        """The hooks in the order of their calls; batches and validations are ``"batch"`` and ``"validation"``."""
        names = {"batch_start": "batch", "validation": "validation", **{hook: hook for hook in _HOOKS}}
        labels = (event.get("name", event["event"]) for event in self.run.record.events)
        return [names[label] for label in labels if label in names]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers at the end, by the names of the trial's attributes: ``"model.0.weight"``."""
        return dict(self.run.observer.final["weights"])

    @property
    def state(self) -> dict[str, Any]:
        """The other state at the end: ``"optimizer"``, ``"scheduler"``, ``"callback"`` and ``"random state"``."""
        return {kind: value for kind, value in self.run.observer.final.items() if kind != "weights"}


def run_trial(
    trial: type,
    *,
    hparams: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    batches: int = 10,
    validate_after: int | None = None,
    aggregation_frequency: int = 1,
    seed: int = 0,
) -> TrainedTrial:
    """Train a trial on a few batches, validate it, and return the results.

    Args:
        trial: a subclass of ``PyTorchTrial``.
        hparams: hyperparameters.
        config: the experiment configuration.
        arguments: the constructor's arguments besides the context. A required ``hparams`` gets the hyperparameters.
        batches: number of batches to train on.
        validate_after: number of batches after which to validate, in addition to the end.
        aggregation_frequency: number of batches per update.
        seed: seed of the random generators of Python, numpy and torch; the call restores their states at the end.

    Returns:
        The metrics, validations, weights, events and state of the training.

    Raises:
        Exception: any error of the trial.

    Example:
        >>> from det_lightning.testing import run_trial
        >>> from model_def import MyTrial
        >>> run = run_trial(MyTrial, hparams={"lr": 0.1, "global_batch_size": 8}, batches=6)
        >>> len(run.metrics), sorted(run.metrics[0])
        (6, ['loss'])
    """
    validations = frozenset([validate_after] if validate_after else [])
    options = TrialOptions(trial.__qualname__, Path(), hparams, config, arguments or {}, batches, seed)
    with contextlib.closing(TrialRuns(options, GivenTrial(trial))) as runs:
        settings = dataclasses.replace(runs.settings, aggregation_frequency=aggregation_frequency)
        run = train(runs.source, runs.plan("the run", settings, validate_after=validations))
    if run.failure is not None:
        raise run.failure.error
    return TrainedTrial(run)


def assert_same_training(one: TrainedTrial, other: TrainedTrial) -> None:
    """Assert that two trainings are equal to the bit: data, metrics, learning rates, weights, events and final state.

    Raises:
        AssertionError: the trainings differ; the message names the first difference and its size.

    Example:
        >>> from det_lightning.testing import assert_same_training, run_trial
        >>> from model_def import MyTrial
        >>> hparams = {"lr": 0.1, "global_batch_size": 8}
        >>> assert_same_training(run_trial(MyTrial, hparams=hparams), run_trial(MyTrial, hparams=hparams))
    """
    # The settings may differ, as long as the trainings do not.
    same_settings = dataclasses.replace(other.run.record, settings=one.run.record.settings)
    second = dataclasses.replace(other.run, record=same_settings)
    if (difference := compare_runs(one.run, second)) is not None:
        named = dataclasses.replace(difference, sides=("in the first", "in the second"))
        raise CheckFailed(f"The trainings differ. {named}")


def assert_resumes(
    trial: type,
    *,
    hparams: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    batches: int = 12,
    seed: int = 0,
) -> None:
    """Assert that a trial ends the same if stopped and resumed, at boundaries of every kind.

    The arguments are as in :func:`run_trial`; ``batches`` must be at least 6.

    Raises:
        AssertionError: a resumed run differs; the message names the first difference, and state missing in the
            checkpoint.
        ValueError: ``batches`` is too small.

    Example:
        >>> from det_lightning.testing import assert_resumes
        >>> from model_def import MyTrial
        >>> assert_resumes(MyTrial, hparams={"lr": 0.1, "global_batch_size": 8})
    """
    if batches < MIN_BATCHES:
        raise ValueError(f"batches must be at least {MIN_BATCHES}; got {batches}.")
    options = TrialOptions(trial.__qualname__, Path(), hparams, config, arguments or {}, batches, seed)
    with contextlib.closing(TrialRuns(options, GivenTrial(trial))) as runs:
        for check in (mid_epoch, epoch_end, after_validation, mid_aggregation):
            with contextlib.suppress(NotCompared):  # the trial has no such boundary
                check(runs)
