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
from det_lightning.pytorch.random_state import isolated_rng
from det_lightning.testing import recorder
from det_lightning.testing.observation.observer import Observer, observed
from det_lightning.testing.own_code import own_frames
from det_lightning.testing.records.record import RunSettings, TrainingRecord
from det_lightning.testing.training.trial_source import TrialSource
from det_lightning.units import Batch

_QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
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
class RunPlan:
    """What a run does besides its settings, in batches trained.

    Attributes:
        validate_after: where to validate besides at the end; None for the period of the settings.
        checkpoint_after: where to write checkpoints besides at the end.
        epoch_limit: an epoch has at most so many batches; None for all.
        validation_batches: a validation has at most so many; None for all.
    """

    validate_after: frozenset[int] | None = None
    checkpoint_after: frozenset[int] = frozenset()
    epoch_limit: int | None = None
    validation_batches: int | None = None

    def limits(self) -> dict[str, Any]:
        """Return the flags of ``pl.Trainer`` for it."""
        limits = {"limit_train_batches": self.epoch_limit, "limit_val_batches": self.validation_batches}
        return {name: limit for name, limit in limits.items() if limit is not None}


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception that ended a run.

    Attributes:
        error: the exception.
        stage: what was under way.
        text: traceback in the user's files, and the error.
    """

    error: BaseException
    stage: str
    text: str

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
    """A run, and what was seen of it.

    Attributes:
        name: for messages.
        record: what the recorder saw.
        observer: what was seen besides.
        plan: what was to happen.
        checkpoints: directory of the checkpoint after so many batches.
        failure: what ended it; None if it came to its end.
    """

    name: str
    record: TrainingRecord
    observer: Observer
    plan: RunPlan
    checkpoints: dict[int, Path]
    failure: Failure | None = None

    @property
    def begun(self) -> bool:
        """Whether its training began."""
        return any(event.get("name") == "on_training_start" for event in self.record.events)


def train(
    source: TrialSource,
    settings: RunSettings,
    name: str,
    observer: Observer,
    *,
    storage: Path,
    plan: RunPlan = RunPlan(),
    resume_from: Path | str | None = None,
    trusted: bool = False,
    distributed: Any = None,
    threads: int | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Run:
    """Train by Determined's API; an error of the trial ends up in the result.

    Args:
        source: of the trial's class.
        settings: what the run depends on.
        name: for messages.
        observer: sees the run.
        storage: for checkpoints.
        plan: what happens besides.
        resume_from: the checkpoint to go on from.
        trusted: read it even if that runs code.
        distributed: the processes of the run.
        threads: torch's number of threads, by default as it is.
        around: a context manager to train in.
    """
    init = {"trial_seed": settings.seed, "tensorboard_path": storage / "tensorboard", "distributed": distributed}
    fit: dict[str, Any] = {
        "checkpoint_period": _schedule(plan.checkpoint_after),
        "checkpoint_storage": storage,
        "code_dir": _empty_directory(storage),
        "latest_checkpoint": resume_from,
        "trusted": trusted,
        "preemption": False,
    }
    if plan.validate_after is not None:
        fit["validation_period"] = _schedule(plan.validate_after)

    def fit_trial(trial_class: type) -> None:
        trainer = {**_QUIET, **plan.limits()}
        recorder.train(trial_class, pytorch, dict(vars(settings)), observer, init, trainer, fit)

    return _observe(source, settings, plan, name, observer, storage, fit_trial, around, threads)


def train_under_lightning(
    source: TrialSource, settings: RunSettings, name: str, observer: Observer, *, storage: Path, plan: RunPlan
) -> Run:
    """Train by Lightning's API; see :func:`train`."""

    def fit_trial(trial_class: type) -> None:
        module = _module(
            trial_class,
            settings,
            aggregation_frequency=settings.aggregation_frequency,
            max_length=Batch(settings.batches),
            validation_period=_schedule(plan.validate_after or frozenset()) or Batch(sys.maxsize),
            reporting_period=Batch(settings.reporting_period),
        )
        period = _schedule(plan.checkpoint_after)
        checkpoints = DeterminedCheckpoint(
            storage, policy="none", period=period, code_dir=_empty_directory(storage), async_write=False
        )
        flags = {**_QUIET, **plan.limits(), "enable_model_summary": False}
        trainer = pl.Trainer(max_epochs=-1, callbacks=[checkpoints], **_device(), **flags)
        recorder.seed_all(settings.seed)
        trainer.fit(module)
        observer.end(observer.trial)

    return _observe(source, settings, plan, name, observer, storage, fit_trial)


def validate(
    source: TrialSource, settings: RunSettings, name: str, observer: Observer, checkpoint: str, *, storage: Path
) -> Run:
    """Validate with the weights of a checkpoint, on all of the validation data; see :func:`train`."""

    def validate_trial(trial_class: type) -> None:
        module = _module(trial_class, settings)
        trainer = pl.Trainer(enable_model_summary=False, **_device(), **_QUIET)
        recorder.seed_all(settings.seed)
        trainer.validate(module, ckpt_path=checkpoint, verbose=False)

    return _observe(source, settings, RunPlan(), name, observer, storage, validate_trial)


def _module(trial_class: type, settings: RunSettings, **options: Any) -> TrialModule:
    return TrialModule(
        trial_class,
        hparams=dict(settings.hparams),
        exp_conf=settings.config,
        trial_kwargs=dict(settings.arguments),
        trial_seed=settings.seed,
        **options,
    )


def _device() -> dict[str, Any]:
    """Return the flags of ``pl.Trainer`` for the device that Determined's API chooses."""
    return {"accelerator": "cuda" if torch.cuda.is_available() else "cpu", "devices": 1}


def _schedule(batches: frozenset[int]) -> Batch | None:
    return Batch(batches) if batches else None


def _empty_directory(storage: Path) -> Path:
    """Return what is copied into checkpoints in place of the working directory, which may be large."""
    directory = storage.parent / "no_code"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _observe(
    source: TrialSource,
    settings: RunSettings,
    plan: RunPlan,
    name: str,
    observer: Observer,
    storage: Path,
    fit: Callable[[type], None],
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    threads: int | None = None,
) -> Run:
    storage.mkdir(parents=True, exist_ok=True)
    failure = None
    with _torch_settings(threads), source.imported() as trial_class, isolated_rng(), _quiet():
        try:
            with around():
                fit(observed(trial_class, observer))
        except (Exception, errors.InvalidExperimentException, SystemExit) as e:
            failure = Failure(e, _stage(observer), own_frames(e, source.directory))
        finally:
            observer.release()
        environment = recorder.environment("det_lightning")
    record = TrainingRecord(
        trial=source.spec,
        settings=settings,
        environment=environment,
        events=tuple(observer.events),
        batches=observer.batches,
        error=None if failure is None else recorder.error_of(failure.error),
    )
    return Run(name, record, observer, plan, _checkpoints(storage), failure)


def _stage(observer: Observer) -> str:
    for event in reversed(observer.events):
        stage = _STAGES.get(event.get("name", event["event"]))
        if stage is not None:
            return stage.format(batch=event["batch"])
    return "while the trial is built"


def _checkpoints(storage: Path) -> dict[int, Path]:
    metadata = storage.glob("*/metadata.json")
    return {json.loads(file.read_text())["steps_completed"]: file.parent for file in metadata}


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
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning.pytorch", "det_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
