"""Functions for a team's own tests of its trials."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from det_lightning.testing.checks import resuming
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.options import MIN_BATCHES, TrialOptions
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.training.execution import ObservedRun, RunPlan, TrialSetup, train
from det_lightning.testing.training.requirements import arguments_of
from det_lightning.testing.training.run_differences import first_difference
from det_lightning.testing.training.runs import TrialRuns
from det_lightning.testing.training.trial_source import GivenTrial

__all__ = ["TrainedTrial", "assert_resumes", "assert_same_training", "run_trial"]


@dataclasses.dataclass(frozen=True)
class TrainedTrial:
    """What was seen of a training.

    Attributes:
        run: all of it, for :func:`assert_same_training`.
    """

    run: ObservedRun

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each batch, as numpy values."""
        return [_of_kind(entry.values, "metric") for entry in self.run.observer.happenings if entry.what == "batch"]

    @functools.cached_property
    def learning_rates(self) -> list[list[float]]:
        """The learning rates before each batch, of every group of every optimizer."""
        return [
            [float(rate) for rate in _of_kind(entry.values, "learning rate").values()]
            for entry in self.run.observer.happenings
            if entry.what == "batch"
        ]

    @functools.cached_property
    def validations(self) -> list[tuple[int, dict[str, Any]]]:
        """For each validation the number of batches trained, and its metrics."""
        return [
            (entry.batches, _of_kind(entry.values, "validation metric"))
            for entry in self.run.observer.happenings
            if entry.what == "validation"
        ]

    @functools.cached_property
    def events(self) -> list[str]:
        """The hooks that the callbacks were called for, in order, with a ``"batch"`` for each batch between them."""
        return [entry.what for entry in self.run.observer.happenings]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers at the end, by the names of the trial's attributes: ``"model.0.weight"``."""
        found: dict[str, torch.Tensor] = self.run.final["weights"]
        return found

    @property
    def state(self) -> dict[str, Any]:
        """What else there was at the end: ``"optimizer"``, ``"scheduler"``, ``"callback"``, ``"random state"``."""
        return {kind: value for kind, value in self.run.final.items() if kind != "weights"}


def _of_kind(values: Mapping[tuple[str, str], Any], kind: str) -> dict[str, Any]:
    return {name: value for (of_kind, name), value in values.items() if of_kind == kind}


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
    """Train a trial on a few batches, validate it, and return what was seen.

    Args:
        trial: a subclass of ``PyTorchTrial``.
        hparams: its hyperparameters.
        config: its experiment configuration.
        arguments: of its constructor, beyond the context; ``hparams`` are passed where it asks for them.
        batches: how many to train on.
        validate_after: validate after so many batches too, besides at the end.
        aggregation_frequency: number of batches of an update.
        seed: of Python's, numpy's and torch's random generators, which are as before afterwards.

    Raises:
        Exception: what the trial raised.
    """
    source = GivenTrial(trial)
    setup = TrialSetup(source, hparams, config, arguments_of(source, hparams, arguments or {}), seed)
    plan = RunPlan(
        batches,
        validate_after=frozenset([validate_after] if validate_after else []),
        validation_batches=None,
        aggregation_frequency=aggregation_frequency,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = train(setup, plan, trial.__qualname__, Observer(), storage=Path(folder) / "checkpoints")
    if run.failure is not None:
        raise run.failure.error
    return TrainedTrial(run)


def assert_same_training(one: TrainedTrial, other: TrainedTrial) -> None:
    """Assert that two trainings are equal to the bit: data, metrics, learning rates, weights, events and the end.

    Raises:
        AssertionError: they are not; names the first difference, and by how much.
    """
    difference = first_difference(one.run, other.run)
    if difference is not None:
        difference = dataclasses.replace(difference, runs=("the first", "the second"))
        raise CheckFailed(f"The trainings are not the same. First difference: {difference}")


def assert_resumes(
    trial: type,
    *,
    hparams: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    batches: int = 12,
    seed: int = 0,
) -> None:
    """Assert that a trial ends the same when it is stopped and resumed, at boundaries of every kind.

    The arguments are those of :func:`run_trial`; there must be at least 6 batches.

    Raises:
        AssertionError: it does not; names the first difference, and state that the checkpoint lacks.
        ValueError: there are too few batches.
    """
    if batches < MIN_BATCHES:
        raise ValueError(f"batches must be at least {MIN_BATCHES}; got {batches}.")
    source = GivenTrial(trial)
    options = TrialOptions(source.name, source.directory, hparams, config, arguments or {}, batches, seed)
    runs = TrialRuns(options, source)
    try:
        for check in (resuming.mid_epoch, resuming.epoch_end, resuming.after_validation, resuming.mid_aggregation):
            try:
                check(runs)
            except NotChecked:
                continue  # data without such a boundary need not resume there
    finally:
        runs.close()
