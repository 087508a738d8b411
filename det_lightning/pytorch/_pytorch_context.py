"""The context of a trial: what it wraps its models in, and what it trains through."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from det_lightning import errors
from det_lightning.core._distributed import DistributedContext
from det_lightning.distributed.backend import Backend, LocalBackend, parameters_of
from det_lightning.hyperparameters import chosen_hparams
from det_lightning.precision import ChosenPrecision, WholeModelPrecision
from det_lightning.pytorch._data import to_device
from det_lightning.pytorch._experimental import PyTorchExperimentalContext
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._position import PositionName, TrainingPosition
from det_lightning.pytorch._reducer import ReducerRegistry
from det_lightning.pytorch._settings import TrialSettings
from det_lightning.pytorch._tensorboard import TensorBoardOutput, default_directory
from det_lightning.pytorch._wrapping import WrappedParts

logger = logging.getLogger(__name__)

ClipGrads = Callable[[Any], Any]


class PyTorchTrialContext:
    """Handed to a trial's ``__init__``; made by ``init()``, ``TrialModule`` or ``CheckpointLoadContext``.

    Args:
        hparams: hyperparameters.
        exp_conf: experiment configuration.
        trial_seed: seed that ``get_trial_seed`` returns.
        aggregation_frequency: number of batches whose gradients make one optimizer update.
        average_aggregated_gradients: divide the gradients of an update by ``aggregation_frequency``, unless an
            optimizer is wrapped with its own choice.
        distributed: the processes of the run; by default this one alone.
        backend: the devices of the run; by default one.
        enable_tensorboard_logging: write the metrics as TensorBoard files.
        tensorboard_path: their directory; by default one below ``runs/``.
        loading_only: the trial is built to hold the weights of a checkpoint, or to be tried out by hand; nothing is
            placed on a device.

    Attributes:
        models, optimizers, lr_schedulers: what the trial wrapped, in that order.
        device: where batches and models go.
        distributed: rank and size.
        settings: see :class:`TrialSettings`.
        wrapped: see :class:`WrappedParts`.
        precision: see :class:`ChosenPrecision`.
        backend: see :class:`Backend`.
        position: the current batch, and the length of an epoch; see :class:`TrainingPosition`.
        experimental: see :class:`PyTorchExperimentalContext`.
    """

    def __init__(
        self,
        *,
        hparams: dict[str, Any] | None = None,
        exp_conf: dict[str, Any] | None = None,
        trial_seed: int | None = None,
        aggregation_frequency: int = 1,
        average_aggregated_gradients: bool = True,
        distributed: DistributedContext | None = None,
        backend: Backend | None = None,
        enable_tensorboard_logging: bool = True,
        tensorboard_path: str | os.PathLike[str] | None = None,
        loading_only: bool = False,
    ) -> None:
        self.distributed = distributed or DistributedContext()
        self.settings = TrialSettings(
            hparams, exp_conf, trial_seed, self.distributed.size, aggregation_frequency, average_aggregated_gradients
        )
        self.backend = backend or LocalBackend()
        self.device = self.backend.device
        self.precision = ChosenPrecision(self.backend, self.distributed.size)
        self.wrapped = WrappedParts(self.distributed, None if loading_only else self.backend, self.precision)
        self.models = self.wrapped.models
        self.optimizers = self.wrapped.optimizers
        self.lr_schedulers = self.wrapped.lr_schedulers
        self.reducers = ReducerRegistry(self.distributed.allgather, self.distributed.size)
        self.experimental = PyTorchExperimentalContext(
            functools.partial(self.precision.use_amp, self.models), self.wrap_reducer
        )
        self.profiler: Any = None
        self.position = TrainingPosition()
        self._tensorboard_path = pathlib.Path(tensorboard_path) if tensorboard_path else default_directory()
        # A test may put another method in the place of this one.
        self.tensorboard = TensorBoardOutput(enable_tensorboard_logging, lambda: self.get_tensorboard_path())
        #: Called with the parameters before each optimizer step (the callbacks of Determined 0.13).
        self.before_step: list[Callable[[Iterable[torch.nn.Parameter]], None]] = []
        self.optimizer_steps = 0
        self._loading_only = loading_only
        self._stop_requested = False
        self._warned_types: set[type] = set()

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> PyTorchTrialContext:
        """Return a context for trying out a trial by hand, as up to Determined 0.19.

        Its trial is built, and ``train_batch`` and ``evaluate_batch`` called, without a run: models stay where the
        trial makes them, and each batch updates them.

        Args:
            config: an experiment configuration. Of a range among its ``hyperparameters`` the middle is taken, of
                ``categorical`` the first value.

        Raises:
            ValueError: a hyperparameter is of an unknown type, or lacks its values.
        """
        seed = (config.get("reproducibility") or {}).get("experiment_seed", 0)
        hparams = chosen_hparams(config)
        return PyTorchTrialContext(hparams=hparams, exp_conf=dict(config), trial_seed=seed, loading_only=True)

    # Settings

    def get_hparams(self) -> dict[str, Any]:
        """Return all hyperparameters; raise ValueError if none were given."""
        return self.settings.get_hparams()

    def get_hparam(self, name: str) -> Any:
        """Return the hyperparameter ``name``; raise ValueError if there is no such one, or none were given at all."""
        return self.settings.get_hparam(name)

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment configuration; raise ValueError if none was given."""
        return self.settings.get_experiment_config()

    def get_data_config(self) -> dict[str, Any]:
        """Return the ``data`` section of the experiment configuration, empty if there is no such section.

        Raises:
            ValueError: there is no experiment configuration.
        """
        return self.settings.get_data_config()

    def get_global_batch_size(self) -> int:
        """Return the number of records in a batch over all slots.

        Raises:
            ValueError: hparams has no ``global_batch_size``.
        """
        return self.settings.get_global_batch_size()

    def get_per_slot_batch_size(self) -> int:
        """Return the number of records in a batch on one slot: ``global_batch_size // slots``.

        Raises:
            ValueError: hparams has no ``global_batch_size``.
        """
        return self.settings.get_per_slot_batch_size()

    def get_trial_seed(self) -> int:
        """Return the seed of the trial; raise InternalException if it has none."""
        return self.settings.get_trial_seed()

    @property
    def aggregation_frequency(self) -> int:
        """Number of batches whose gradients make one optimizer update."""
        return self.settings.aggregation_frequency

    _aggregation_frequency = aggregation_frequency

    # Wrapping

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make a model ready for training, on its device; use what is returned.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``; or the ranks wrap different models.
        """
        return self.wrapped.wrap_model(model)

    def wrap_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> torch.optim.Optimizer:
        """Register an optimizer; use what is returned.

        Args:
            optimizer: over parameters of wrapped models.
            backward_passes_per_step: number of backward passes per parameter in one batch (used by Horovod).
            fp16_compression: exchange gradients in half precision (used by Horovod); by default as
                ``optimizations.gradient_compression`` of the experiment configuration says.
            average_aggregated_gradients: divide the gradients of an update by the aggregation frequency; by default
                as for the whole context.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``, or ``backward_passes_per_step`` below 1.
        """
        if fp16_compression is None:
            fp16_compression = self.settings.compresses_gradients()
        if average_aggregated_gradients is None:
            average_aggregated_gradients = self.settings.average_aggregated_gradients
        return self.wrapped.wrap_optimizer(
            optimizer, backward_passes_per_step, fp16_compression, average_aggregated_gradients
        )

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1) -> Any:
        """Register a learning rate scheduler, and return it as it is.

        Args:
            lr_scheduler: its optimizer must be what ``wrap_optimizer`` returned.
            step_mode: when the training loop steps it.
            frequency: step at every ``frequency``-th of those moments.

        Raises:
            InvalidExperimentException: the optimizer was not wrapped, or a ``ReduceLROnPlateau`` is to be stepped
                automatically.
            TypeError: ``step_mode`` is not a ``LRScheduler.StepMode``.
        """
        return self.wrapped.wrap_lr_scheduler(lr_scheduler, step_mode, frequency)

    def wrap_reducer(
        self, reducer: Any, name: str | None = None, for_training: bool = True, for_validation: bool = True
    ) -> Any:
        """Register a metric that is computed over all batches and ranks together.

        Args:
            reducer: a function of the list of all values given to ``update()``; a :class:`MetricReducer`; or a
                torchmetrics ``Metric`` or ``MetricCollection``.
            name: the name of the metric; None if the reducer returns a dict of metrics.
            for_training: reduce at the end of training workloads.
            for_validation: reduce at the end of validations.

        Returns:
            What to update: ``reducer`` itself, or for a function an object with the method ``update(value)``.

        Raises:
            AssertionError: the object was wrapped before, or is none of these.
        """
        if isinstance(reducer, torch.nn.Module) and not self._loading_only:
            reducer.to(self.device)  # the state of a torchmetrics metric has to be where the batches are
        return self.reducers.wrap_reducer(reducer, name, for_training, for_validation)

    def reset_reducers(self) -> None:
        """Reset every wrapped reducer; the training loop does so before each workload."""
        self.reducers.reset()

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """Return the metrics of the wrapped reducers, over all ranks; the training loop reports them.

        Raises:
            ValueError, AssertionError: a reducer failed, or its result does not fit its name; names it.
        """
        return self.reducers.reduce(for_training)

    def get_model(self) -> torch.nn.Module:
        """Return the wrapped model of a trial that has one."""
        return self.wrapped.only_model()

    def get_optimizer(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer of a trial that has one."""
        return self.wrapped.only_optimizer()

    def get_lr_scheduler(self) -> Any:
        """Return the wrapped learning rate scheduler of a trial that has one, None if it has none."""
        return self.wrapped.only_lr_scheduler()

    # Precision

    def wrap_scaler(self, scaler: Any) -> Any:
        """Register a gradient scaler so that checkpoints hold its state; scaling and updating stay with the trial.

        Args:
            scaler: a ``torch.amp.GradScaler`` or ``torch.cuda.amp.GradScaler``. Pass it to ``step_optimizer`` too.

        Raises:
            InvalidExperimentException: there is a scaler already, a model was wrapped before, apex is in use, or the
                precision was chosen outside of the trial.
        """
        return self.precision.register_scaler(scaler, self.models)

    def autocast_forward_pass(self, to_wrap: torch.nn.Module) -> torch.nn.Module:
        """Make a model's forward pass run under autocast, and what it returns in half precision float32.

        The model itself is changed and returned, so that parameters, hooks and attributes stay where they are. Where
        there is no CUDA device autocast changes nothing, as in Determined.
        """
        return self.precision.autocast_forward(to_wrap)

    def use_whole_model_precision(self, precision: WholeModelPrecision) -> None:
        """Make all models compute in a precision, those that are wrapped already too.

        Raises:
            InvalidExperimentException: the trial has chosen one itself, or trained in another one before, or wrapped
                models cannot be cast any more.
        """
        self.precision.use_for_whole_models(precision, self.models)

    def configure_apex_amp(
        self,
        models: Any,
        optimizers: Any,
        enabled: bool | None = True,
        opt_level: str | None = "O1",
        cast_model_type: torch.dtype | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int | None = 1,
        verbosity: int | None = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> tuple[Any, Any]:
        """Configure the precision of models and optimizers by apex's levels; docs/precision.md describes them.

        Use what is returned. On the CPU bfloat16 takes the place of float16, with a warning.

        Args:
            models: what ``wrap_model`` returned, one or a list.
            optimizers: what ``wrap_optimizer`` returned, one or a list.
            enabled: False leaves everything as it is.
            opt_level: ``"O0"`` (float32), ``"O1"`` (autocast), ``"O2"`` (half precision with float32 masters and batch
                norms), ``"O3"`` (half precision).
            cast_model_type: what weights and inputs are cast to.
            patch_torch_functions: run forward passes under autocast.
            keep_batchnorm_fp32: leave batch norms in float32; also as a string.
            master_weights: make optimizers update float32 copies.
            loss_scale: a number, also as a string, or ``"dynamic"``.
            cast_model_outputs: what outputs are cast to; float32 by default.
            num_losses: number of losses in a batch with a scaler of their own; 1 scales all losses alike.
            verbosity: 0 keeps the log free of what was configured.
            min_loss_scale: where a dynamic scale ends to be halved.
            max_loss_scale: where a dynamic scale ends to be doubled.

        Returns:
            Models and optimizers, each alone or as a list, as given.

        Raises:
            InvalidExperimentException: an argument is wrong, a model or an optimizer is not wrapped or does not belong
                to the others, a model is in half precision already; it is a second call, or torch.amp is in use.
        """
        if not enabled or self._loading_only:
            return models, optimizers
        # None is apex's word for an argument that was left out, and there the property stays as the level has it.
        overrides = {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
            "cast_model_outputs": cast_model_outputs,
            "num_losses": num_losses,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        wrapped = (self.models, self.optimizers)
        return self.precision.configure_level((models, optimizers), wrapped, opt_level, verbosity, overrides)

    @property
    def scaler(self) -> Any:
        """The gradient scaler, of ``wrap_scaler`` or ``use_amp``; None if there is none."""
        return self.precision.scaler

    @property
    def _scaler(self) -> Any:
        # Setting this was the one way to use_amp() with a scaler of other arguments.
        return self.precision.scaler

    @_scaler.setter
    def _scaler(self, scaler: Any) -> None:
        self.precision.replace_scaler(scaler)

    # Training

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Compute gradients; the arguments are those of ``torch.Tensor.backward``.

        With several ranks gradients are exchanged only on batches that update the optimizers.
        """
        self.precision.path.backward(loss, gradient, retain_graph, create_graph)

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: ClipGrads | None = None,
        auto_zero_grads: bool = True,
        scaler: Any | None = None,
        *,
        backward_passes_per_step: int = 1,
    ) -> None:
        """Update the parameters, on batches that close an aggregation; a no-op on the others.

        Args:
            optimizer: what ``wrap_optimizer`` returned.
            clip_grads: called with the list of the optimizer's parameters, their gradients exchanged and averaged.
            auto_zero_grads: zero the gradients after the step.
            scaler: step through this gradient scaler.
            backward_passes_per_step: accepted as in Determined 0.13; it is an argument of ``wrap_optimizer``.

        Raises:
            InvalidExperimentException: the optimizer was not wrapped, or ``auto_zero_grads`` is false while
                gradients are aggregated over batches.
        """
        average = self.wrapped.averages.get(optimizer)
        if average is None:
            raise errors.InvalidExperimentException(
                f"step_optimizer() got a {type(optimizer).__name__} that was not wrapped. Pass what wrap_optimizer() "
                f"returned; {len(self.optimizers)} optimizer(s) are wrapped."
            )
        frequency = self.settings.aggregation_frequency
        if frequency > 1:
            if not auto_zero_grads:
                raise errors.InvalidExperimentException(
                    f"step_optimizer(auto_zero_grads=False) with aggregation_frequency={frequency}: gradients of "
                    "several batches are summed, so they have to be zeroed after each update."
                )
            if not self.is_update_batch():
                return
        path = self.precision.path
        if path.exchanges:
            path.synchronize(optimizer)
        if frequency > 1 and average:
            _divide_gradients(optimizer, frequency)
        if clip_grads is not None or self.before_step:
            self._before_step(optimizer, clip_grads)
        path.step(optimizer, scaler)
        self.optimizer_steps += 1
        if auto_zero_grads:
            optimizer.zero_grad()

    def _before_step(self, optimizer: torch.optim.Optimizer, clip_grads: ClipGrads | None) -> None:
        if self.precision.scaling is not None:
            self.precision.scaling.unscale(optimizer)
        parameters = parameters_of(optimizer)
        if clip_grads is not None:
            clip_grads(parameters)
        for hook in self.before_step:
            hook(parameters)

    def is_update_batch(self) -> bool:
        """Tell whether the current batch closes an aggregation, so that optimizers step on it."""
        return self._loading_only or (self.position.batch() + 1) % self.settings.aggregation_frequency == 0

    def to_device(self, data: Any) -> Any:
        """Move data that the trial made itself to the device; batches of the loader are moved already."""
        return to_device(data, self.device, self._warned_types)

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ask for the run to end, with a checkpoint, at the next boundary.

        Raises:
            AssertionError: the argument is not a bool.
        """
        if not isinstance(stop_requested, bool):
            raise AssertionError(f"set_stop_requested() takes a bool; got {stop_requested!r}.")
        logger.info("The trial asked to stop; it will at the next boundary.")
        self._stop_requested = stop_requested

    def get_stop_requested(self) -> bool:
        """Tell whether the trial asked for the run to end."""
        return self._stop_requested

    # Position

    def is_epoch_start(self) -> bool:
        """Tell whether the current batch is the first of its epoch."""
        return self.position.batch() % self.position.epoch_length() == 0

    def is_epoch_end(self) -> bool:
        """Tell whether the current batch is the last of its epoch."""
        return (self.position.batch() + 1) % self.position.epoch_length() == 0

    def current_train_epoch(self) -> int:
        """Return the index of the current epoch, from 0."""
        return self.position.batch() // self.position.epoch_length()

    def current_train_batch(self) -> int:
        """Return the index of the current batch over the whole run, from 0.

        Raises:
            InternalException: training has not started.
        """
        return self.position.batch()

    # Trials look at these in their evaluation, and tests that run a trial by hand set them.
    _current_batch_idx = PositionName("batch_idx")
    _epoch_len = PositionName("epoch_len")
    _should_communicate_and_update = is_update_batch

    def get_initial_batch(self) -> int:
        """Return the index of the first batch of this run: 0, or where the checkpoint it goes on from stopped."""
        return self.position.initial_batch

    def get_experiment_id(self) -> int:
        """Return 0: there are no experiments without a master."""
        return 0

    def get_trial_id(self) -> int:
        """Return 0, the id that Determined gives to a local trial."""
        return 0

    # Outputs

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Switch the writing of metrics as TensorBoard files on or off.

        Raises:
            AssertionError: the argument is not a bool.
        """
        if not isinstance(enable_tensorboard_logging, bool):
            raise AssertionError(f"set_enable_tensorboard_logging() takes a bool; got {enable_tensorboard_logging!r}.")
        self.tensorboard.enabled = enable_tensorboard_logging

    def get_enable_tensorboard_logging(self) -> bool:
        """Tell whether metrics are written as TensorBoard files."""
        return self.tensorboard.enabled

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the directory of this run's TensorBoard files."""
        return self._tensorboard_path

    def get_tensorboard_writer(self) -> Any:
        """Return the ``SummaryWriter`` of this run; it is made on the first call."""
        return self.tensorboard.writer

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with ``torch.profiler.profile(*args, **kwargs)``, stepped once per batch.

        Traces go to the directory of the TensorBoard files.
        """
        handler = torch.profiler.tensorboard_trace_handler(str(self.get_tensorboard_path()))
        self.profiler = torch.profiler.profile(*args, on_trace_ready=handler, **kwargs)


def _divide_gradients(optimizer: torch.optim.Optimizer, divisor: int) -> None:
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None:
            parameter.grad.data.div_(float(divisor))
