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
from det_lightning.arguments import refuse_texts
from det_lightning.callbacks.checkpoint import DeterminedCheckpoint
from det_lightning.callbacks.experiment import ExperimentReporter, end_for_invalid_hp, report_invalid_hp
from det_lightning.callbacks.preemption import PreemptionHandler, interrupts_in_one_line
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.core._task import TRY_BATCHES, TRY_VARIABLE, current_task
from det_lightning.core._with_statement import for_with_statement
from det_lightning.escaping import get_logger
from det_lightning.hyperparameters import explain_texts
from det_lightning.pytorch._lightning_trainer import (
    choose_callback,
    choose_checkpoints,
    choose_preemption,
    list_callbacks,
    make_lightning_trainer,
    require_parts,
)
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial, SelfSavingTrial
from det_lightning.pytorch._random_state import isolated_rng, seed_everything
from det_lightning.pytorch._settings import ExpConf, RunConfiguration
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.topology import elastic_job
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
        checkpoints: the callback of the latest :meth:`fit`, with the paths of the last and the best checkpoint.

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
        self.checkpoints: DeterminedCheckpoint | None = None
        if context.distributed.rank == 0:
            read = trial.config_fields if isinstance(trial, SelfSavingTrial) else ()
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
            KeyboardInterrupt: on Ctrl-C, with one line about the saved checkpoint and without a traceback.
        """
        tried_batches = TRY_BATCHES if os.environ.get(TRY_VARIABLE) else 0
        refuse_texts("fit()", test_mode=test_mode, trusted=trusted, step_zero_validation=step_zero_validation)
        configuration = self._context.settings.configuration
        schedule = configuration.complete(
            max_length=max_length,
            validation_period=validation_period,
            reporting_period=reporting_period,
            step_zero_validation=step_zero_validation,
        )
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
        job = None if (elastic := elastic_job()) is None else f"{elastic}/{next(_fits)}"
        names = {} if self._experiment is None else self._experiment.checkpoint_arguments()
        self.checkpoints = choose_callback(
            self._context,
            checkpoints,
            {"job": job, **names},
            checkpoint_policy=checkpoint_policy,
            checkpoint_period=checkpoint_period,
            checkpoint_storage=checkpoint_storage,
        )
        try:
            self._fit(
                self.checkpoints,
                choose_checkpoints(self._context.distributed, self.checkpoints, latest_checkpoint),
                choose_preemption(list_callbacks(self._lightning)),
                storage_options=self.checkpoints.storage.options,
                test_mode=test_mode or tried_batches,
                **({"trusted": trusted} if self._experiment is None else self._experiment.trust(trusted)),
                **{**_DEFAULT_SCHEDULE, **schedule},
            )
        finally:
            self.checkpoints.close()

    def _fit(
        self, checkpoints: DeterminedCheckpoint, newest: list[str], preemption: PreemptionHandler, **options: Any
    ) -> None:
        module = TrialModule(self._trial, context=self._context, newest_first=newest, **options)
        # Modules that Lightning imports while it is set up may draw random numbers.
        with isolated_rng(), quiet_hints():
            trainer = make_lightning_trainer(self._context, self._experiment, self._lightning, checkpoints, preemption)
        resumes_from = newest[0] if newest else None
        try:
            with interrupts_in_one_line(module, checkpoints, preemption, resumes_from), quiet_hints():
                trainer.fit(module, ckpt_path=resumes_from)
        except errors.ShouldExit as ended:
            if isinstance(ended.__cause__, errors.InvalidHP):
                report_invalid_hp(current_task())
