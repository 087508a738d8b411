"""Runs of a trial in this process, under observation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.adapters.lightning_internals import reraise_keyboard_interrupt
from det_lightning.adapters.lightning_package import pl
from det_lightning.callbacks import DeterminedCheckpoint, PreemptionHandler
from det_lightning.distributed.backend import choose_device
from det_lightning.pytorch import Batch
from det_lightning.pytorch._random_state import isolated_rng
from det_lightning.testing import recorder
from det_lightning.testing.observation.call_watch import CallWatch
from det_lightning.testing.observation.observer import Observer, observe_trial
from det_lightning.testing.observation.shortened_data import ALL_DATA, ShortenedData
from det_lightning.testing.records.comparison import first_difference
from det_lightning.testing.records.difference import Difference
from det_lightning.testing.records.record import RunSettings, TrainingRecord
from det_lightning.testing.training.trial_source import TrialSource, own_frames

_QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
_LOGGERS = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning.pytorch", "det_lightning")]
_BUILDING = "while the trial is built"
# The stage of a run after an event of the log, until the next of these events.
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
    """How to run a trial; positions are numbers of batches."""

    name: str  # the name of the run in messages
    settings: RunSettings
    storage: Path  # directory for checkpoints
    validate_after: frozenset[int] | None = None  # in addition to the end; None for the period of the settings
    checkpoint_after: frozenset[int] = frozenset()
    limits: dict[str, Any] = dataclasses.field(default_factory=dict)  # flags of pl.Trainer
    data: ShortenedData = ALL_DATA
    validates_first: bool = False  # before the first batch
    resume_from: Path | str | None = None  # a checkpoint
    trusted: bool = False  # read the checkpoint even if reading executes code
    distributed: Any = None  # DistributedContext of the run
    strategy: str | None = None  # how several processes train
    threads: int | None = None  # number of torch's threads; None leaves it unchanged
    recorded: dict[str, Any] | None = None  # arguments for the Observer, beyond the trial; None records no calls
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # training runs inside it

    @property
    def no_code(self) -> Path:
        """A directory to copy into checkpoints in place of the working directory, which may be large."""
        return self.storage.parent / "no_code"


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception that ended a run."""

    error: BaseException
    stage: str  # what the run was doing
    text: str  # traceback in the user's files, and the error

    def __reduce__(self) -> Any:  # the error may be of a class of the trial
        return Failure, (RuntimeError(self.reason), self.stage, self.text)

    @property
    def reason(self) -> str:
        return traceback.format_exception_only(self.error)[-1].strip().partition("\n")[0][:160]

    @property
    def description(self) -> str:
        """Stage and error in one line, and the traceback below."""
        return f"{self.stage}: {self.reason}\n{self.text}"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run with the observations."""

    plan: RunPlan
    record: TrainingRecord
    observer: Observer
    checkpoints: dict[int, Path]  # directories, by number of batches trained
    failure: Failure | None = None

    @property
    def fails_in_validation(self) -> bool:
        return self.failure is not None and self.failure.stage.startswith("in the validation")

    @property
    def was_built(self) -> bool:
        """Whether the constructor of the trial returned."""
        return self.failure is None or self.failure.stage != _BUILDING

    @property
    def training_began(self) -> bool:
        return any(event.get("name") == "on_training_start" for event in self.record.events)


def compare_runs(one: Run, other: Run, after: int | None = None) -> Difference | None:
    """Return the first difference between two runs; ``other`` may resume from ``one`` after ``after`` batches."""
    start = "on_training_start" if after is None else "on_checkpoint_upload_end"
    sides = (f"in {one.plan.name}", f"in {other.plan.name}")
    return compare_records(one.record.since(start, after), other.record, sides)


def compare_records(one: TrainingRecord, other: TrainingRecord, sides: tuple[str, str] = ("", "")) -> Difference | None:
    """Return the first difference from the start of training of ``other`` on."""
    difference = first_difference(one, other.since("on_training_start"))
    return None if difference is None else dataclasses.replace(difference, sides=sides)


def train(source: TrialSource, plan: RunPlan) -> Run:
    """Train with Determined's API; an error of the trial becomes the failure of the run."""
    observer = Observer() if plan.recorded is None else Observer(source, **plan.recorded)
    logs = plan.storage / "tensorboard"
    init = {"trial_seed": plan.settings.seed, "tensorboard_path": logs, "distributed": plan.distributed}
    init["strategy"] = plan.strategy
    trainer = {**_QUIET, **plan.limits, "callbacks": [PreemptionHandler(signals=[])]}
    fit: dict[str, Any] = {
        "checkpoints": _make_checkpoints(plan),
        "latest_checkpoint": plan.resume_from,
        "trusted": plan.trusted,
        "step_zero_validation": plan.validates_first,
    }
    if plan.validate_after is not None:
        fit["validation_period"] = _make_schedule(plan.validate_after)
    arguments = (pytorch, vars(plan.settings), observer, {"init": init, "Trainer": trainer, "fit": fit})
    return _observe_run(source, plan, observer, lambda trial_class: recorder.train(trial_class, *arguments))


def validate(source: TrialSource, plan: RunPlan) -> Run:
    """Validate with the weights of the checkpoint to resume from; see :func:`train`."""

    def validate_trial(trial_class: type) -> None:
        settings = recorder.copy_settings(vars(plan.settings))
        recorder.seed_all(settings["seed"])
        module = TrialModule(
            trial_class,
            hparams=settings["hparams"],
            exp_conf=settings["config"],
            trial_kwargs=settings["arguments"],
            trial_seed=settings["seed"],
        )
        # On the device that Determined's API chooses.
        flags = {**_QUIET, "accelerator": choose_device().type, "devices": 1, "enable_model_summary": False}
        with reraise_keyboard_interrupt():
            pl.Trainer(**flags).validate(module, ckpt_path=plan.resume_from, verbose=False)

    return _observe_run(source, plan, Observer(), validate_trial)


def _make_checkpoints(plan: RunPlan) -> DeterminedCheckpoint:
    period = _make_schedule(plan.checkpoint_after)
    plan.no_code.mkdir(parents=True, exist_ok=True)
    return DeterminedCheckpoint(plan.storage, policy="none", period=period, code_dir=plan.no_code)


def _make_schedule(batches: frozenset[int]) -> Batch | None:
    return Batch(batches) if batches else None


def _observe_run(source: TrialSource, plan: RunPlan, observer: Observer, fit: Callable[[type], None]) -> Run:
    plan.storage.mkdir(parents=True, exist_ok=True)
    failure = None
    settings = _process_settings(plan.threads)
    watch = contextlib.nullcontext() if observer.source is None else CallWatch(observer, source.directory).around()
    # Names that the trial imports are observed, too.
    with (
        settings,
        plan.around(),
        watch,
        source.import_class() as trial_class,
        isolated_rng(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            fit(observe_trial(trial_class, observer, plan.data))
        except (Exception, errors.InvalidExperimentException, SystemExit) as e:
            # init() ends the process after an InvalidHP.
            error = e.__context__ if isinstance(e, SystemExit) and isinstance(e.__context__, errors.InvalidHP) else e
            labels = [(event.get("name", event["event"]), event["batch"]) for event in observer.events]
            stages = [_STAGES[label].format(batch=batch) for label, batch in labels if label in _STAGES]
            failure = Failure(error, [_BUILDING, *stages][-1], own_frames(error, source.directory))
        environment = recorder.environment("det_lightning")
    observer.release()
    recorded = None if failure is None else recorder.describe_error(failure.error)
    record = TrainingRecord(source.spec, plan.settings, environment, tuple(observer.events), observer.batches, recorded)
    metadata = plan.storage.glob("*/metadata.json")
    checkpoints = {json.loads(file.read_text())["steps_completed"]: file.parent for file in metadata}
    return Run(plan, record, observer, checkpoints, failure)


@contextlib.contextmanager
def _process_settings(threads: int | None) -> Iterator[None]:
    """Silence logs, share the cores with other workers of pytest-xdist, and undo settings of the trial."""
    before = torch.get_num_threads()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.callback(torch.set_num_threads, before)
        undo.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.set_num_threads(threads or max(1, before // workers))
        for logger in _LOGGERS:
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield
