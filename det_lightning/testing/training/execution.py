"""Training a trial in this process, through either door, under observation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from det_lightning import errors
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.pytorch.random_state import isolated_rng
from det_lightning.pytorch.trainer import Trainer, init
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.observation.observing import observed
from det_lightning.testing.training.surroundings import quietly, seed_generators, torch_defaults
from det_lightning.testing.training.trial_source import TrialSource, own_frames
from det_lightning.units import Batch

__all__ = ["Failure", "ObservedRun", "RunPlan", "TrialSetup", "train", "train_under_lightning", "validate"]

_QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


@dataclasses.dataclass(frozen=True)
class TrialSetup:
    """What a trial is built with.

    Attributes:
        source: of its class.
        hparams, config: for its context.
        arguments: of its constructor, beyond the context.
        seed: of Python's, numpy's and torch's random generators.
    """

    source: TrialSource
    hparams: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What happens when in a run, in batches trained.

    Attributes:
        batches: the length.
        validate_after, checkpoint_after: where, besides at the end.
        epoch_limit: an epoch has at most so many batches.
        validation_batches: a validation has at most so many; None for all.
        aggregation_frequency: number of batches of an update.
    """

    batches: int
    validate_after: frozenset[int] = frozenset()
    checkpoint_after: frozenset[int] = frozenset()
    epoch_limit: int | None = None
    validation_batches: int | None = 4
    aggregation_frequency: int = 1

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
    def told(self) -> str:
        """Stage and error in one line, and the traceback below."""
        return f"{self.stage}: {self.reason}\n{self.text}"


@dataclasses.dataclass(frozen=True)
class ObservedRun:
    """A run, and what was seen of it.

    Attributes:
        name: for messages.
        observer: what was seen.
        plan: what was to happen.
        checkpoints: directory of the checkpoint after so many batches.
        final: weights, state of optimizers, schedulers, callbacks and random generators at the end.
        failure: what ended it; None if it came to its end.
    """

    name: str
    observer: Observer
    plan: RunPlan
    checkpoints: dict[int, Path] = dataclasses.field(default_factory=dict)
    final: dict[str, Any] = dataclasses.field(default_factory=dict)
    failure: Failure | None = None


def train(
    setup: TrialSetup,
    plan: RunPlan,
    name: str,
    observer: Observer,
    *,
    storage: Path,
    resume_from: Path | str | None = None,
    trusted: bool = False,
    distributed: Any = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> ObservedRun:
    """Train through Determined's door; an error of the trial ends up in the result.

    Args:
        setup: the trial.
        plan: what happens when.
        name: for messages.
        observer: writes down what is seen.
        storage: for checkpoints.
        resume_from: the checkpoint to go on from.
        trusted: read it even if that runs code.
        distributed: the processes of the run.
        around: a context manager to train in.
    """

    def fit(trial_class: type) -> None:
        with init(
            hparams=setup.hparams,
            exp_conf=setup.config,
            trial_seed=setup.seed,
            aggregation_frequency=plan.aggregation_frequency,
            enable_tensorboard_logging=False,
            tensorboard_path=storage / "tensorboard",
            distributed=distributed,
        ) as context:
            trial = trial_class(context, **setup.arguments)
            trainer = Trainer(trial, context, **_QUIET, **plan.limits())
            trainer.fit(
                max_length=Batch(plan.batches),
                validation_period=_schedule(plan.validate_after),
                checkpoint_period=_schedule(plan.checkpoint_after),
                checkpoint_policy="none",
                checkpoint_storage=storage,
                code_dir=_empty_directory(storage),
                latest_checkpoint=resume_from,
                trusted=trusted,
                preemption=False,
            )

    return _observe(setup, plan, name, observer, storage, around, fit)


def train_under_lightning(
    setup: TrialSetup, plan: RunPlan, name: str, observer: Observer, *, storage: Path
) -> ObservedRun:
    """Train through Lightning's door; see :func:`train`."""

    def fit(trial_class: type) -> None:
        module = _module(
            trial_class,
            setup,
            aggregation_frequency=plan.aggregation_frequency,
            max_length=Batch(plan.batches),
            validation_period=_schedule(plan.validate_after) or Batch(sys.maxsize),
            reporting_period=Batch(100),
        )
        period = _schedule(plan.checkpoint_after)
        checkpoints = DeterminedCheckpoint(
            storage, policy="none", period=period, code_dir=_empty_directory(storage), async_write=False
        )
        flags = {**_QUIET, **plan.limits(), "enable_model_summary": False}
        trainer = pl.Trainer(max_epochs=-1, callbacks=[checkpoints], **_device(), **flags)
        seed_generators(setup.seed)
        trainer.fit(module)

    return _observe(setup, plan, name, observer, storage, contextlib.nullcontext, fit)


def validate(setup: TrialSetup, name: str, observer: Observer, checkpoint: str, *, storage: Path) -> ObservedRun:
    """Validate with the weights of a checkpoint, on all of the validation data; see :func:`train`."""

    def fit(trial_class: type) -> None:
        module = _module(trial_class, setup)
        trainer = pl.Trainer(enable_model_summary=False, **_device(), **_QUIET)
        seed_generators(setup.seed)
        trainer.validate(module, ckpt_path=checkpoint, verbose=False)

    return _observe(setup, RunPlan(0), name, observer, storage, contextlib.nullcontext, fit)


def _module(trial_class: type, setup: TrialSetup, **options: Any) -> TrialModule:
    return TrialModule(
        trial_class,
        hparams=setup.hparams,
        exp_conf=setup.config,
        trial_kwargs=setup.arguments,
        trial_seed=setup.seed,
        **options,
    )


def _device() -> dict[str, Any]:
    """Return the flags of ``pl.Trainer`` for the device that Determined's door chooses."""
    return {"accelerator": "cuda" if torch.cuda.is_available() else "cpu", "devices": 1}


def _schedule(batches: frozenset[int]) -> Batch | None:
    return Batch(batches) if batches else None


def _empty_directory(storage: Path) -> Path:
    """Return what is copied into checkpoints in place of the working directory, which may be large."""
    directory = storage.parent / "no_code"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _observe(
    setup: TrialSetup,
    plan: RunPlan,
    name: str,
    observer: Observer,
    storage: Path,
    around: Callable[[], contextlib.AbstractContextManager[Any]],
    fit: Callable[[type], None],
) -> ObservedRun:
    storage.mkdir(parents=True, exist_ok=True)
    failure, final = None, {}
    with torch_defaults(), setup.source.imported() as trial_class, isolated_rng(), quietly():
        try:
            with around():
                fit(observed(trial_class, observer))
            final = _final_state(observer)
        except (Exception, errors.InvalidExperimentException, SystemExit) as e:
            failure = Failure(e, observer.stage, own_frames(e, setup.source.directory))
        finally:
            observer.release()
    return ObservedRun(name, observer, plan, _checkpoints(storage), final, failure)


def _final_state(observer: Observer) -> dict[str, Any]:
    context = observer.context
    return {
        "weights": {
            f"{name}.{of_tensor.removeprefix('module.')}": tensor.detach().cpu().clone()
            for name, model in observer.models().items()
            for of_tensor, tensor in model.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        },
        "optimizer": [optimizer.state_dict() for optimizer in context.optimizers],
        "scheduler": [scheduler.state_dict() for scheduler in context.lr_schedulers],
        "callback": {name: callback.state_dict() for name, callback in observer.callbacks.items()},
        "random state": {
            "torch": torch.get_rng_state(),
            "numpy": repr(np.random.get_state()),
            "Python": random.getstate(),
        },
    }


def _checkpoints(storage: Path) -> dict[int, Path]:
    found = {}
    for metadata in storage.glob("*/metadata.json"):
        found[json.loads(metadata.read_text())["steps_completed"]] = metadata.parent
    return found
