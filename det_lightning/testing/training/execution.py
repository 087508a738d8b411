"""Training a trial in this process, by either API, under observation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.pytorch import Batch
from det_lightning.pytorch._random_state import isolated_rng
from det_lightning.testing import recorder
from det_lightning.testing.observation.observer import Observer, observed
from det_lightning.testing.own_code import own_frames
from det_lightning.testing.records.record import TrainingRecord
from det_lightning.testing.training.plans import RunPlan
from det_lightning.testing.training.trial_source import TrialSource

_QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
_LOGGERS = ("pytorch_lightning", "lightning.pytorch", "det_lightning")
# What is under way after an event of the log, until the next of these.
_STAGES = {
    "start": "before its data loaders are built",
    "on_trial_startup": "while its data loaders are built",
    "on_checkpoint_load_start": "while a checkpoint is loaded",
    "batch_start": "while it trains on batch {batch}",
    "on_validation_start": "in the validation after {batch} batches",
    "on_checkpoint_save_start": "while a checkpoint is written after {batch} batches",
}


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception that ended a run."""

    error: BaseException  # the exception
    stage: str  # what was under way
    text: str  # traceback in the user's files, and the error

    @property
    def reason(self) -> str:
        """The error in one line."""
        return traceback.format_exception_only(self.error)[-1].strip().partition("\n")[0][:160]

    @property
    def description(self) -> str:
        """Stage and error in one line, and the traceback below."""
        return f"{self.stage}: {self.reason}\n{self.text}"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, and what was seen of it."""

    plan: RunPlan  # what was to happen
    record: TrainingRecord  # what the recorder saw
    observer: Observer  # what was seen besides
    checkpoints: dict[int, Path]  # directory of the checkpoint after so many batches
    failure: Failure | None = None  # what ended it; None if it came to its end

    @property
    def training_began(self) -> bool:
        """Whether its training began."""
        return any(event.get("name") == "on_training_start" for event in self.record.events)


def train(source: TrialSource, plan: RunPlan, observer: Observer) -> Run:
    """Train by Determined's API; an error of the trial ends up in the result."""
    init = {
        "trial_seed": plan.settings.seed,
        "tensorboard_path": plan.storage / "tensorboard",
        "distributed": plan.distributed,
    }
    fit: dict[str, Any] = {
        "checkpoint_period": _schedule(plan.checkpoint_after),
        "checkpoint_storage": plan.storage,
        "code_dir": _empty_directory(plan.storage),
        "latest_checkpoint": plan.resume_from,
        "trusted": plan.trusted,
        "preemption": False,
    }
    if plan.validate_after is not None:
        fit["validation_period"] = _schedule(plan.validate_after)

    def fit_trial(trial_class: type) -> None:
        trainer = {**_QUIET, **plan.limits()}
        recorder.train(trial_class, pytorch, dict(vars(plan.settings)), observer, init, trainer, fit)

    return _observe(source, plan, observer, fit_trial)


def train_under_lightning(source: TrialSource, plan: RunPlan, observer: Observer) -> Run:
    """Train by Lightning's API; see :func:`train`."""

    def fit_trial(trial_class: type) -> None:
        module = _module(
            trial_class,
            plan,
            aggregation_frequency=plan.settings.aggregation_frequency,
            max_length=Batch(plan.settings.batches),
            validation_period=_schedule(plan.validate_after or frozenset()) or Batch(sys.maxsize),
            reporting_period=Batch(plan.settings.reporting_period),
        )
        checkpoints = DeterminedCheckpoint(
            plan.storage,
            policy="none",
            period=_schedule(plan.checkpoint_after),
            code_dir=_empty_directory(plan.storage),
            async_write=False,
        )
        _trainer(max_epochs=-1, callbacks=[checkpoints], **plan.limits()).fit(module)
        observer.end(observer.trial)

    return _observe(source, plan, observer, fit_trial)


def validate(source: TrialSource, plan: RunPlan, observer: Observer) -> Run:
    """Validate with the weights of the checkpoint to resume from; see :func:`train`."""

    def validate_trial(trial_class: type) -> None:
        _trainer().validate(_module(trial_class, plan), ckpt_path=plan.resume_from, verbose=False)

    return _observe(source, plan, observer, validate_trial)


def _module(trial_class: type, plan: RunPlan, **options: Any) -> TrialModule:
    settings = plan.settings
    recorder.seed_all(settings.seed)
    return TrialModule(
        trial_class,
        hparams=dict(settings.hparams),
        exp_conf=settings.config,
        trial_kwargs=dict(settings.arguments),
        trial_seed=settings.seed,
        **options,
    )


def _trainer(**flags: Any) -> pl.Trainer:
    """Return a trainer for the device that Determined's API chooses."""
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    return pl.Trainer(accelerator=accelerator, devices=1, enable_model_summary=False, **_QUIET, **flags)


def _schedule(batches: frozenset[int]) -> Batch | None:
    return Batch(batches) if batches else None


def _empty_directory(storage: Path) -> Path:
    """Return what is copied into checkpoints in place of the working directory, which may be large."""
    directory = storage.parent / "no_code"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _observe(source: TrialSource, plan: RunPlan, observer: Observer, fit: Callable[[type], None]) -> Run:
    plan.storage.mkdir(parents=True, exist_ok=True)
    failure = None
    with _torch_settings(plan.threads), source.imported() as trial_class, isolated_rng(), _quiet():
        try:
            with plan.around():
                fit(observed(trial_class, observer))
        except (Exception, errors.InvalidExperimentException, SystemExit) as e:
            failure = Failure(e, _stage(observer), own_frames(e, source.directory))
        finally:
            observer.release()
        environment = recorder.environment("det_lightning")
    error = None if failure is None else recorder.error_of(failure.error)
    record = TrainingRecord(
        source.spec, plan.settings, environment, tuple(observer.events), observer.batches, error=error
    )
    metadata = plan.storage.glob("*/metadata.json")
    checkpoints = {json.loads(file.read_text())["steps_completed"]: file.parent for file in metadata}
    return Run(plan, record, observer, checkpoints, failure)


def _stage(observer: Observer) -> str:
    labels = [(event.get("name", event["event"]), event["batch"]) for event in reversed(observer.events)]
    stages = (_STAGES[label].format(batch=batch) for label, batch in labels if label in _STAGES)
    return next(stages, "while the trial is built")


@contextlib.contextmanager
def _torch_settings(threads: int | None) -> Iterator[None]:
    """Undo what a trial sets for the whole process; share the cores with the other workers of pytest-xdist."""
    dtype = torch.get_default_dtype()
    before = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(threads or max(1, before // workers))
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what would be said of each of many short runs."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in _LOGGERS}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
