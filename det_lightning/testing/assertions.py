"""Functions for a team's own tests of its trials."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from det_lightning.testing.checks import resuming
from det_lightning.testing.checks.training import difference_of_runs
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.options import MIN_BATCHES, TrialOptions
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.records.record import RunSettings
from det_lightning.testing.training.execution import Run, train
from det_lightning.testing.training.plans import RunPlan
from det_lightning.testing.training.requirements import arguments_of
from det_lightning.testing.training.runs import TrialRuns
from det_lightning.testing.training.trial_source import GivenTrial

# The hooks among the events of a run, besides which there are its batches and validations.
_HOOKS = {
    "on_training_epoch_start",
    "on_training_epoch_end",
    "on_training_workload_end",
    "on_validation_start",
    "on_checkpoint_save_start",
    "on_checkpoint_upload_end",
}


@dataclasses.dataclass(frozen=True)
class TrainedTrial:
    """What was seen of a training.

    Attributes:
        run: all of it, for :func:`assert_same_training`.
    """

    run: Run

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each batch, as numpy values."""
        return self.run.observer.metrics

    @property
    def learning_rates(self) -> list[list[float]]:
        """The learning rates before each batch, of every group of every optimizer."""
        events = self.run.record.named("batch_start")
        return [[rate for rates in event["learning_rates"] for rate in rates] for event in events]

    @property
    def validations(self) -> list[tuple[int, dict[str, Any]]]:
        """For each validation the number of batches trained, and its metrics."""
        return self.run.observer.validations

    @property
    def events(self) -> list[str]:
        """The hooks that the callbacks were called for, in order, with a ``"batch"`` for each batch between them."""
        names = {"batch_start": "batch", "validation": "validation", **{hook: hook for hook in _HOOKS}}
        events = (names.get(event.get("name", event["event"])) for event in self.run.record.events)
        return [event for event in events if event is not None]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers at the end, by the names of the trial's attributes: ``"model.0.weight"``."""
        weights: dict[str, torch.Tensor] = self.run.observer.final["weights"]
        return weights

    @property
    def state(self) -> dict[str, Any]:
        """What else there was at the end: ``"optimizer"``, ``"scheduler"``, ``"callback"``, ``"random state"``."""
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
    settings = RunSettings(
        hparams=hparams or {},
        config=config,
        arguments=arguments_of(source, hparams, arguments or {}),
        batches=batches,
        seed=seed,
        reporting_period=100,
        aggregation_frequency=aggregation_frequency,
    )
    validations = frozenset([validate_after] if validate_after else [])
    with tempfile.TemporaryDirectory() as folder:
        plan = RunPlan(trial.__qualname__, settings, Path(folder) / "checkpoints", validate_after=validations)
        run = train(source, plan, Observer())
    if run.failure is not None:
        raise run.failure.error
    return TrainedTrial(run)


def assert_same_training(one: TrainedTrial, other: TrainedTrial) -> None:
    """Assert that two trainings are equal to the bit: data, metrics, learning rates, weights, events and the end.

    Raises:
        AssertionError: they are not; names the first difference, and by how much.
    """
    # What they were asked to do may differ, as long as what they do does not.
    same_settings = dataclasses.replace(other.run.record, settings=one.run.record.settings)
    second = dataclasses.replace(other.run, record=same_settings)
    difference = difference_of_runs(one.run, second, names=("the first", "the second"))
    if difference is not None:
        raise CheckFailed(f"The trainings are not the same. {difference}")


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
