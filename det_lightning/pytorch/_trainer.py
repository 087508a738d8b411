"""Determined's API: ``init`` and ``Trainer`` around ``pl.Trainer`` and ``TrialModule``, and a run's default periods."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.adapters.lightning_internals import quiet_hints
from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.module import TrialModule
from det_lightning.adapters.strategies.processes import TrainingProcesses
from det_lightning.arguments import refuse_texts, require, wrong_argument
from det_lightning.callbacks.checkpoint import DeterminedCheckpoint
from det_lightning.callbacks.experiment import ExperimentReporter, end_for_invalid_hp, report_invalid_hp
from det_lightning.callbacks.preemption import PreemptionHandler, interrupts_in_one_line
from det_lightning.callbacks.profiler import TorchProfiler
from det_lightning.callbacks.progress import TrialProgressBar
from det_lightning.callbacks.tensorboard import DeterminedTensorBoard
from det_lightning.checkpoint.format.content import CheckpointReading
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.core._task import TRY_BATCHES, current_task, is_try, make_try_storage
from det_lightning.core._with_statement import for_with_statement
from det_lightning.escaping import get_logger
from det_lightning.hyperparameters import explain_texts
from det_lightning.masking import mask_url
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import ExternalStateTrial, PyTorchTrial
from det_lightning.pytorch._random_state import isolated_rng, seed_everything
from det_lightning.pytorch._settings import ExpConf, RunConfiguration
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.tracebacks import shorten_traceback
from det_lightning.units import Batch, Epoch, TrainUnit

logger = get_logger(__name__)

_DEFAULT_SCHEDULE = {
    "validation_period": Batch(sys.maxsize),
    "reporting_period": Batch(100),
    "step_zero_validation": False,
}
# Numbers the fits of a script: a restarted script may have trained several trials, and resumes each trial.
_fits = itertools.count(1)


@for_with_statement("with det.pytorch.init(...) as context")
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: ExpConf | None = None,
    distributed: DistributedContext | None = None,
    aggregation_frequency: int | None = None,
    enable_tensorboard_logging: bool = True,
    trial_seed: int | None = None,
    tensorboard_path: str | os.PathLike[str] | None = None,
    strategy: str | pl.strategies.Strategy | None = None,
) -> Iterator[PyTorchTrialContext]:
    """Create the context for a trial; use it in a ``with`` statement.

    Args:
        hparams: the hyperparameters; ``global_batch_size`` is split over the slots. Defaults to the hyperparameters
            of ``exp_conf``, with the middle of each range.
        exp_conf: an experiment configuration, as a YAML file or a dict, which may be partial. Supplies defaults for
            this call and :meth:`Trainer.fit`; the :class:`Trainer` warns of fields without effect. Under
            ``det-lightning run`` the experiment's configuration is used instead.
        distributed: the process group. Defaults to Horovod's if requested, else torchrun's (connected if necessary),
            else a single process.
        aggregation_frequency: number of batches whose gradients make one optimizer update. Defaults to the setting in
            ``exp_conf``, else 1.
        enable_tensorboard_logging: write the metrics as TensorBoard files.
        trial_seed: seed for Python's, numpy's and torch's random generators. Defaults to the ``experiment_seed`` of
            ``exp_conf``; without a seed, the generators are left alone.
        tensorboard_path: directory of the TensorBoard files. Defaults to a new directory below ``runs/``.
        strategy: how several processes train. ``"trial_ddp"``, the default, copies the models to each process;
            ``"trial_fsdp"`` shards the models; ``"horovod"`` is also chosen by ``USE_HOROVOD`` in the environment and
            by ``horovodrun``. Or a strategy of ``det_lightning.adapters.strategies``, with options.

    Raises:
        ConfigError: Determined's master would refuse ``exp_conf``; all mistakes are named.
        ValueError: the strategy is unknown, ``torch.distributed`` does not connect the processes, or Horovod is chosen
            together with another way to train.
        ImportError: Horovod is chosen but not installed.
        InvalidExperimentException: ``hparams`` or ``exp_conf`` is not a dict, or a hyperparameter is a range.
        SystemExit: with status 0, in place of an ``InvalidHP`` that leaves the ``with`` statement on any rank.

    Example:
        >>> import det_lightning as det
        >>> from model_def import MyTrial
        >>> with det.pytorch.init(hparams={"lr": 0.01, "global_batch_size": 8}, trial_seed=1) as context:
        ...     context.get_per_slot_batch_size(), context.get_trial_seed()
        (8, 1)
    """
    task = current_task()
    call = RunConfiguration.of_call(exp_conf, hparams) if task is None else RunConfiguration.of_task(task, hparams)
    options = call.complete(
        aggregation_frequency=aggregation_frequency, average_aggregated_gradients=None, trial_seed=trial_seed
    )
    if "trial_seed" in options:
        seed_everything(options["trial_seed"])
    processes = TrainingProcesses.from_script(distributed, strategy)
    context = PyTorchTrialContext(
        hparams=call.hparams,
        exp_conf=call.exp_conf,
        configuration=call,
        distributed=processes.distributed,
        backend=processes.backend,
        enable_tensorboard_logging=enable_tensorboard_logging,
        tensorboard_path=tensorboard_path or (None if task is None else task.tensorboard_path),
        **options,
    )
    try:
        yield context
    except SystemExit:  # also Preempted
        raise
    except BaseException as error:
        if isinstance(error, TypeError):
            explain_texts(error, context.settings.hparams)
        if isinstance(error, errors.InvalidHP):
            report_invalid_hp(task)  # at once, since the end of another rank may end this process
        context.distributed.abandon(error)
        if task is None:
            shorten_traceback(error)
        end_for_invalid_hp(error, context.distributed.given_up)
        raise
    finally:
        context.distributed.close()


class Trainer:
    """Trains a trial on PyTorch Lightning.

    Args:
        trial: the trial, built with ``context``.
        context: from :func:`init`.
        **lightning: arguments of ``pl.Trainer``: ``logger=``, ``callbacks=``, ``profiler=``, ``enable_progress_bar=``,
            ...; arguments reserved to :meth:`fit` are refused. By default a progress bar is shown in terminals and
            interactive sessions.

    Attributes:
        checkpoints: the callback of the latest :meth:`fit`, with the paths of the last and the best checkpoint; an
            InternalException before the first.

    Example:
        >>> import det_lightning as det
        >>> from model_def import MyTrial
        >>> with det.pytorch.init(hparams={"lr": 0.01, "global_batch_size": 8}) as context:
        ...     trainer = det.pytorch.Trainer(MyTrial(context), context)
        ...     trainer.fit(max_length=det.pytorch.Batch(10), checkpoint_storage="checkpoints")
        >>> len(list(trainer.checkpoints.storage.list_ids()))
        1
    """

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext, **lightning: Any) -> None:
        require_parts(trial, context, lightning)
        self._trial = trial
        self._context = context
        self._lightning = lightning
        task = current_task()
        self._experiment = None if task is None else ExperimentReporter(task)
        self._is_smoke_run = is_try()
        self._checkpoints: DeterminedCheckpoint | None = None
        if context.distributed.rank == 0:
            read = trial.config_fields if isinstance(trial, ExternalStateTrial) else ()
            context.settings.configuration.report("init()", read=read)

    def configure_profiler(
        self,
        sync_timings: bool = True,
        enabled: bool = False,
        begin_on_batch: int = 0,
        end_after_batch: int | None = None,
    ) -> None:
        """Do nothing but log a warning that names the replacement of Determined's system profiler."""
        logger.warning("configure_profiler() has no effect; profile with context.set_profiler(...).")

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | Sequence[TrainUnit] | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit | None = None,
        checkpoint_policy: str | None = None,
        latest_checkpoint: str | os.PathLike[str] | None = None,
        step_zero_validation: bool | None = None,
        test_mode: bool = False,
        profiling_enabled: bool = False,
        *,
        checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | CheckpointStorage | None = None,
        checkpoints: DeterminedCheckpoint | None = None,
        trusted: bool = False,
    ) -> None:
        """Train, validate and checkpoint.

        Arguments that are None come from the experiment configuration given to :func:`init`. If torchrun has restarted
        the script, the run resumes from the newest checkpoint of the interrupted run. ``SIGTERM`` and ``SIGUSR1`` save
        the run and end the process; a ``PreemptionHandler`` in ``callbacks`` chooses other signals.

        Args:
            checkpoint_period: when checkpoints are due, besides the checkpoints by policy and at the end.
            validation_period: when validations are due, besides the validation at the end; one period or several.
            max_length: how long to train, as ``Batch(int)`` or ``Epoch(int)``, over all runs of the trial.
            reporting_period: when training metrics are reported. Defaults to every 100 batches.
            checkpoint_policy: the validations that a checkpoint follows: ``"best"``, ``"all"`` or ``"none"``. The
                default ``"best"`` needs a name in ``exp_conf["searcher"]["metric"]``, and means ``"all"`` without.
            latest_checkpoint: id, path or URL of a checkpoint to resume from, at exactly the next batch. ``"last"`` is
                the newest complete checkpoint in the storage, see ``CheckpointStorage.newest_first``, or a start from
                scratch if the storage is empty.
            step_zero_validation: validate before the first batch.
            test_mode: train one batch, validate one batch, checkpoint, and end.
            profiling_enabled: no effect but a warning: Determined's system profiler needs a master.
            checkpoint_storage: a directory or URL for the checkpoints, the ``checkpoint_storage`` section of an
                experiment configuration, or a ``CheckpointStorage``. Defaults to the configuration's storage, else
                Determined's directory for local runs.
            checkpoints: the callback that writes the checkpoints, in place of ``checkpoint_storage`` and the other
                arguments for checkpoints. Its storage defaults to the configuration's.
            trusted: unpickle anything in ``latest_checkpoint``, running whatever code the checkpoint contains.

        Raises:
            ValueError: ``max_length`` is missing, ``checkpoint_policy`` is unknown, or another argument contradicts
                ``checkpoints``.
            TypeError: a period is not a ``Batch`` or ``Epoch``, or the value of ``max_length`` is not an int.
            InvalidExperimentException: the trial cannot be trained. The message gives the reason.
            CheckpointError: ``latest_checkpoint`` is missing, torn, unsafe, or from another trial; or a checkpoint
                cannot be written, or has vanished by the end.
            Preempted: the process was asked to end, and the run is saved.
            KeyboardInterrupt: on Ctrl-C, with one line about the saved checkpoint and no traceback.
        """
        refuse_texts("fit()", test_mode=test_mode, trusted=trusted, step_zero_validation=step_zero_validation)
        configuration = self._context.settings.configuration
        schedule = configuration.complete(
            max_length=max_length,
            validation_period=validation_period,
            reporting_period=reporting_period,
            step_zero_validation=step_zero_validation,
        )
        if self._is_smoke_run:
            schedule = {"max_length": schedule.get("max_length")}
            place = None  # of an experiment
            if self._experiment is None:
                latest_checkpoint = _find_for_try(self._context, checkpoints, checkpoint_storage, latest_checkpoint)
                ranks = self._context.distributed
                place = ranks.broadcast(make_try_storage() if ranks.rank == 0 else None)
            checkpoints = DeterminedCheckpoint(place, policy="none", period=Batch(sys.maxsize))
            checkpoint_policy = checkpoint_period = checkpoint_storage = None
        max_length = schedule.get("max_length")
        if max_length is None:
            raise ValueError(
                "fit() needs max_length, such as max_length=Batch(1000) or max_length=Epoch(10), or a length in the "
                'exp_conf of init(), such as {"searcher": {"max_length": {"epochs": 10}}}.'
            )
        if not isinstance(max_length, Batch | Epoch) or not isinstance(max_length.value, int):
            raise TypeError(f"max_length must be Batch(int) or Epoch(int); got {max_length!r}.")
        if profiling_enabled:
            logger.warning(
                "profiling_enabled has no effect without a Determined master; profile with context.set_profiler(...)."
            )
        self._context.wrapped.require_same_on_all_ranks()
        job = None if (elastic := _elastic_job()) is None else f"{elastic}/{next(_fits)}"
        names = {} if self._experiment is None else self._experiment.checkpoint_arguments()
        self._checkpoints = checkpoints = choose_callback(
            self._context,
            checkpoints,
            {"job": job, **names},
            checkpoint_policy=checkpoint_policy,
            checkpoint_period=checkpoint_period,
            checkpoint_storage=checkpoint_storage,
        )
        try:
            newest = choose_checkpoints(self._context.distributed, checkpoints, latest_checkpoint)
            reading = CheckpointReading(trusted, checkpoints.storage.options, newest)
            self._fit(
                checkpoints,
                reading if self._experiment is None else self._experiment.complete(reading),
                choose_preemption(list_callbacks(self._lightning)),
                test_mode=test_mode or (TRY_BATCHES if self._is_smoke_run else False),
                **{**_DEFAULT_SCHEDULE, **schedule},
            )
        finally:
            checkpoints.close()

    @property
    def checkpoints(self) -> DeterminedCheckpoint:
        if self._checkpoints is None:
            raise errors.InternalException("There are no checkpoints before fit().")
        return self._checkpoints

    def _fit(
        self,
        checkpoints: DeterminedCheckpoint,
        reading: CheckpointReading,
        preemption: PreemptionHandler,
        **schedule: Any,
    ) -> None:
        module = TrialModule(self._trial, context=self._context, reading=reading, **schedule)
        resumes_from = next(iter(reading.newest_first), None)
        with quiet_hints():
            with isolated_rng():  # modules that Lightning imports while it is set up may draw random numbers
                trainer = make_lightning_trainer(
                    self._context, self._experiment, self._lightning, checkpoints, preemption
                )
            try:
                with interrupts_in_one_line(module, checkpoints, preemption, resumes_from):
                    trainer.fit(module, ckpt_path=resumes_from)
            except errors.ShouldExit as ended:
                if isinstance(ended.__cause__, errors.InvalidHP):
                    report_invalid_hp(current_task())


# Flags of pl.Trainer that fit's own periods replace.
_PERIODS = {"check_val_every_n_epoch", "val_check_interval", "log_every_n_steps"}
# More damaged checkpoints in a row would be no accident.
_MOST_FALLBACKS = 10


def require_parts(trial: Any, context: Any, arguments: Mapping[str, Any]) -> None:
    """Raise a TypeError that names an argument of ``Trainer`` of the wrong kind."""
    call = "Trainer(trial, context)"
    if isinstance(trial, PyTorchTrialContext) and isinstance(context, PyTorchTrial):
        raise TypeError(f"{call} got the context first. Pass the trial first: Trainer(trial, context).")
    advice = "Build it with the context: Trainer(MyTrial(context), context)."
    require(isinstance(trial, PyTorchTrial), call, "a PyTorchTrial", trial, advice)
    advice = "Pass the context that the trial was built with, of `with init(...) as context`."
    require(isinstance(context, PyTorchTrialContext), call, "a PyTorchTrialContext", context, advice)
    for callback in list_callbacks(arguments):
        is_callback = hasattr(callback, "state_key") and not isinstance(callback, type)
        advice = "Callbacks of a trial are returned by its build_callbacks()."
        require(is_callback, "Trainer(callbacks=...)", "callbacks of Lightning", callback, advice)
        is_writer = isinstance(callback, DeterminedCheckpoint)
        advice = "Pass the callback that writes the checkpoints to fit(checkpoints=...)."
        require(not is_writer, "Trainer(callbacks=...)", "other callbacks", callback, advice)


def list_callbacks(arguments: Mapping[str, Any]) -> list[pl.Callback]:
    """Return the callbacks among the arguments of a ``pl.Trainer``, given as a list or a single callback."""
    given = arguments.get("callbacks") or []
    return list(given) if isinstance(given, list) else [given]


def choose_preemption(callbacks: list[pl.Callback]) -> PreemptionHandler:
    """Return the first handler of signals among the callbacks, or a new handler."""
    given = (callback for callback in callbacks if isinstance(callback, PreemptionHandler))
    return next(given, None) or PreemptionHandler()


def _elastic_job() -> str | None:
    """Return the id of torchrun's job, the same after a restart; None without torchrun or without an id."""
    # torchrun calls a job without an id "none".
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if job in (None, "", "none") else job


def _restarts() -> int:
    """Return how often torchrun has restarted the processes of this job."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def choose_callback(
    context: PyTorchTrialContext, given: DeterminedCheckpoint | None, names: Mapping[str, Any], **call: Any
) -> DeterminedCheckpoint:
    """Return the callback that writes the checkpoints: ``given``, or a new callback by the call and the configuration.

    What ``given`` leaves open comes from the call, the configuration, and the ``names`` of the experiment and the job.
    """
    completed = context.settings.configuration.complete(**call)
    arguments = {name.removeprefix("checkpoint_"): value for name, value in completed.items()}
    if given is not None:
        require(isinstance(given, DeterminedCheckpoint), "fit(checkpoints=...)", "a DeterminedCheckpoint", given)
        given.require_agreement(**call)
    callback = given or DeterminedCheckpoint()
    callback.fill_in(**arguments, **names)
    return callback


def _find_for_try(
    context: PyTorchTrialContext,
    checkpoints: DeterminedCheckpoint | None,
    storage: Any,
    latest: str | os.PathLike[str] | None,
) -> str | os.PathLike[str] | None:
    """Return the path of a checkpoint in the script's own storage, which a smoke run reads but does not write to."""
    if latest is None or latest == "last":
        return latest
    where = {"checkpoint_storage": storage, "checkpoint_policy": None, "checkpoint_period": None}
    return choose_callback(context, checkpoints, {}, **where).storage.find(latest)


def make_lightning_trainer(
    context: PyTorchTrialContext,
    experiment: ExperimentReporter | None,
    arguments: Mapping[str, Any],
    checkpoint: DeterminedCheckpoint,
    preemption: PreemptionHandler,
) -> pl.Trainer:
    """Return the trainer of a run, with the ``arguments`` of ``Trainer``, callbacks, and defaults.

    Raise an ``UnsupportedTrainerFlags`` that names the arguments reserved to ``fit``.
    """
    given = dict(arguments)
    device = context.device
    decided = {
        "accelerator": device.type,
        "devices": [device.index or 0] if device.type == "cuda" else context.distributed.local_size,
        "num_nodes": context.distributed.cross_size,
        "strategy": TrainingProcesses(context.distributed, context.backend).make_strategy(),
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        "inference_mode": False,
    }
    clashing = sorted((decided.keys() | _PERIODS) & given.keys())
    if clashing:
        raise errors.UnsupportedTrainerFlags(
            f"Trainer() got {', '.join(clashing)}, which fit() sets itself, as by max_length=, validation_period= and "
            "reporting_period=. To choose other values, use pl.Trainer with det_lightning.adapters.TrialModule."
        )
    callbacks: list[pl.Callback] = [checkpoint, DeterminedTensorBoard(context.tensorboard)]
    if experiment is not None:
        callbacks[:0] = experiment.callbacks(context.tensorboard)
        if "logger" not in given:
            given["logger"] = experiment.make_loggers()
    if context.profiler is not None:
        callbacks.append(TorchProfiler(context.profiler))
    given.pop("callbacks", None)
    callbacks += list_callbacks(arguments)
    if preemption not in callbacks:
        callbacks.append(preemption)
    has_bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks)
    # Somebody can see a bar move in a terminal, and in an interactive session such as a notebook.
    shows_bar = given.get("enable_progress_bar", has_bar or sys.stderr.isatty() or hasattr(sys, "ps1"))
    if shows_bar and not has_bar:
        callbacks.append(TrialProgressBar())
    saves = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)
    defaults = {"logger": False, "enable_checkpointing": saves, "enable_model_summary": False}
    defaults["enable_progress_bar"] = shows_bar
    return pl.Trainer(**{**defaults, **given, **decided}, callbacks=callbacks)


def choose_checkpoints(
    distributed: DistributedContext,
    checkpoints: DeterminedCheckpoint,
    latest: str | os.PathLike[str] | None,
) -> list[str]:
    """Return on every rank the checkpoint to resume from, followed by earlier checkpoints to fall back to."""
    if not (latest is None or isinstance(latest, str | os.PathLike)):
        raise TypeError(wrong_argument("latest_checkpoint=", "the id, path or URL of a checkpoint, or 'last'", latest))
    found: list[str] = []
    if distributed.rank == 0:
        storage = checkpoints.storage
        most = _MOST_FALLBACKS if checkpoints.fall_back else 1
        found = _find_latest(storage, latest, checkpoints.job, most)
    chosen: list[str] = distributed.broadcast(found)
    return chosen


def _find_latest(
    storage: CheckpointStorage, latest: str | os.PathLike[str] | None, job: str | None, most: int
) -> list[str]:
    """Return the checkpoint to resume from; if the newest, followed by earlier ones, at most ``most`` in all."""
    if _restarts():
        if job is None:
            logger.warning(
                "The script was restarted, but the job has no id to find checkpoints by. Start torchrun with "
                "--rdzv-id, or pass latest_checkpoint='last'."
            )
        elif newest := [*itertools.islice(storage.newest_first(job), most)]:
            shown = mask_url(newest[0])
            logger.warning("The script was restarted; the run resumes from its newest checkpoint, %s.", shown)
            return newest
    if latest is None:
        return []
    if latest == "last":
        return [*itertools.islice(storage.newest_first(), most)]
    try:
        return [storage.find(latest)]
    except errors.CheckpointNotFound as e:
        raise errors.CheckpointNotFound(
            f"latest_checkpoint={mask_url(os.fspath(latest))!r}: {e} latest_checkpoint='last' resumes from the newest."
        ) from e
