"""The context of a trial: what it wraps its models in, and what it steps through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.core.distributed import DistributedContext
from det_lightning.pytorch import data
from det_lightning.pytorch.amp import autocast_forward_pass
from det_lightning.pytorch.backend import Backend, LocalBackend
from det_lightning.pytorch.experimental import PyTorchExperimentalContext
from det_lightning.pytorch.lr_scheduler import LRScheduler
from det_lightning.pytorch.position import TrainingPosition
from det_lightning.pytorch.reducers import ReducerRegistry
from det_lightning.pytorch.settings import RunSettings
from det_lightning.pytorch.tensorboard import TensorBoardOutput

__all__ = ["PyTorchTrialContext"]

logger = logging.getLogger("det_lightning.pytorch")

ClipGrads = Callable[[Any], Any]


class PyTorchTrialContext(RunSettings):
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
        loading_only: the trial is built to hold the weights of a checkpoint; nothing is placed on a device.

    Attributes:
        models, optimizers, lr_schedulers: what the trial wrapped, in that order.
        device: where batches and models go.
        distributed: rank and size.
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
        loading_only: bool = False,
    ) -> None:
        self.distributed = distributed or DistributedContext()
        super().__init__(hparams, exp_conf, trial_seed, self.distributed.size)
        if aggregation_frequency < 1:
            raise ValueError(f"aggregation_frequency must be at least 1; got {aggregation_frequency}.")
        self.aggregation_frequency = aggregation_frequency
        self.backend: Backend = backend or LocalBackend()
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_schedulers: list[LRScheduler] = []
        self.scaler: Any = None
        self.profiler: Any = None
        self.position = TrainingPosition()
        self.reducers = ReducerRegistry(self.distributed)
        self.tensorboard = TensorBoardOutput(enable_tensorboard_logging)
        self.experimental = PyTorchExperimentalContext(self.wrap_scaler, self.wrap_reducer)
        #: Called with the parameters before each optimizer step (the callbacks of Determined 0.13).
        self.before_step: list[Callable[[Iterable[torch.nn.Parameter]], None]] = []
        self.optimizer_steps = 0
        self._loading_only = loading_only
        self._average_by_default = average_aggregated_gradients
        self._averages: dict[torch.optim.Optimizer, bool] = {}
        self._amp_configured = False
        self._stop_requested = False
        self._warned_types: set[type] = set()

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.backend.device

    # Wrapping

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Place a model for training; use what is returned.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``.
        """
        self._require_before_amp("wrap_model")
        if not self._loading_only:
            model = self.backend.wrap_model(model)
        if self.experimental.auto_amp:
            model = self.autocast_forward_pass(model)
        self.models.append(model)
        return model

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
            fp16_compression: exchange gradients in half precision (used by Horovod).
            average_aggregated_gradients: divide the gradients of an update by the aggregation frequency; by default
                as the context was told.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``, or ``backward_passes_per_step`` below 1.
        """
        self._require_before_amp("wrap_optimizer")
        if backward_passes_per_step < 1:
            raise errors.InvalidExperimentException(
                f"wrap_optimizer(backward_passes_per_step=...) must be at least 1; got {backward_passes_per_step}."
            )
        if not self._loading_only:
            optimizer = self.backend.wrap_optimizer(
                optimizer, backward_passes_per_step=backward_passes_per_step, fp16_compression=fp16_compression
            )
        average = self._average_by_default if average_aggregated_gradients is None else average_aggregated_gradients
        self._averages[optimizer] = average
        self.optimizers.append(optimizer)
        return optimizer

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
        plateau = isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau and step_mode is not LRScheduler.StepMode.MANUAL_STEP:
            raise errors.InvalidExperimentException(
                f"ReduceLROnPlateau was wrapped with step_mode={step_mode}: its step() needs a metric, which the "
                "training loop does not have. Wrap it with LRScheduler.StepMode.MANUAL_STEP and call "
                "step(metrics[...]) in the on_validation_end of a callback."
            )
        optimizer = getattr(lr_scheduler, "optimizer", None)
        if optimizer is not None and optimizer not in self.optimizers:
            raise errors.InvalidExperimentException(
                f"{type(lr_scheduler).__name__} was given an optimizer ({type(optimizer).__name__}) that was not "
                "wrapped. Build the scheduler from what wrap_optimizer() returned."
            )
        self.lr_schedulers.append(LRScheduler(lr_scheduler, step_mode, frequency))
        return lr_scheduler

    def wrap_scaler(self, scaler: Any) -> Any:
        """Register a gradient scaler so that checkpoints hold its state; scaling and updating stay with the trial.

        Raises:
            InvalidExperimentException: there is a scaler already, a model was wrapped before, or apex is in use.
        """
        if self._amp_configured:
            raise errors.InvalidExperimentException(
                "wrap_scaler() after configure_apex_amp(): use either torch.amp or apex levels, not both."
            )
        if self.scaler is not None:
            raise errors.InvalidExperimentException(
                "There is a gradient scaler already: call wrap_scaler() or experimental.use_amp() once."
            )
        if self.models:
            raise errors.InvalidExperimentException(
                "Call wrap_scaler() or experimental.use_amp() before the first wrap_model()."
            )
        self.scaler = scaler
        return scaler

    def autocast_forward_pass(self, to_wrap: torch.nn.Module) -> torch.nn.Module:
        """Make a model's forward pass run under autocast, with float32 outputs."""
        return autocast_forward_pass(to_wrap, self.device)

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
        """Configure the precision of models and optimizers by apex's levels.

        Only ``enabled=False`` and the plain float32 level ``"O0"`` exist in this version; both leave models and
        optimizers as they are and return them in the shape in which they came.

        Raises:
            InvalidExperimentException: another level, a second call, or a gradient scaler is in use.
        """
        if not enabled or self._loading_only:
            return models, optimizers
        if self.scaler is not None and self.scaler.is_enabled():
            raise errors.InvalidExperimentException(
                "configure_apex_amp() after wrap_scaler() or use_amp(): use either torch.amp or apex levels, not both."
            )
        if self._amp_configured:
            raise errors.InvalidExperimentException("configure_apex_amp() was called a second time; call it once.")
        if opt_level != "O0":
            raise errors.InvalidExperimentException(
                f"configure_apex_amp(opt_level={opt_level!r}): this version trains in float32 (opt_level='O0') or "
                "through torch.amp. Call context.experimental.use_amp() instead, or wait for a version with the "
                "apex levels."
            )
        self._amp_configured = True
        return models, optimizers

    def _require_before_amp(self, method: str) -> None:
        if self._amp_configured:
            raise errors.InvalidExperimentException(f"Call {method}() before configure_apex_amp(), not after it.")

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
        return self.reducers.wrap_reducer(reducer, name, for_training, for_validation)

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
        if self.experimental.auto_amp:
            loss = self.scaler.scale(loss)
        self.backend.backward(
            loss, self._is_update_batch(), gradient=gradient, retain_graph=retain_graph, create_graph=create_graph
        )

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
        if optimizer not in self._averages:
            raise errors.InvalidExperimentException(
                f"step_optimizer() got a {type(optimizer).__name__} that was not wrapped. Pass what wrap_optimizer() "
                f"returned; {len(self.optimizers)} optimizer(s) are wrapped."
            )
        frequency = self.aggregation_frequency
        if frequency > 1:
            if not auto_zero_grads:
                raise errors.InvalidExperimentException(
                    f"step_optimizer(auto_zero_grads=False) with aggregation_frequency={frequency}: gradients of "
                    "several batches are summed, so they have to be zeroed after each update."
                )
            if not self._is_update_batch():
                return
            if self._averages[optimizer]:
                _divide_gradients(optimizer, frequency)
        if clip_grads is not None or self.before_step:
            self._before_step(optimizer, clip_grads)
        self.backend.step(optimizer, self.scaler if scaler is None and self.experimental.auto_amp else scaler)
        self.optimizer_steps += 1
        if auto_zero_grads:
            optimizer.zero_grad()

    def _before_step(self, optimizer: torch.optim.Optimizer, clip_grads: ClipGrads | None) -> None:
        if self.experimental.auto_amp:
            self.scaler.unscale_(optimizer)
        parameters = _parameters_of(optimizer)
        if clip_grads is not None:
            clip_grads(parameters)
        for hook in self.before_step:
            hook(parameters)

    def _is_update_batch(self) -> bool:
        return self.aggregation_frequency == 1 or self.is_update_batch()

    def is_update_batch(self) -> bool:
        """Tell whether the current batch closes an aggregation, so that optimizers step on it."""
        return self._loading_only or (self.current_train_batch() + 1) % self.aggregation_frequency == 0

    def to_device(self, batch: Any) -> Any:
        """Move data that the trial made itself to the device; batches of the loader are moved already."""
        return data.to_device(batch, self.device, self._warned_types)

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

    def get_initial_batch(self) -> int:
        """Return the index of the first batch of this run: 0, or where the checkpoint it goes on from stopped."""
        return self.position.initial_batch

    def get_experiment_id(self) -> int:
        """Return 0: there are no experiments without a master."""
        return 0

    def get_trial_id(self) -> int:
        """Return 0, the id that Determined gives to a local trial."""
        return 0

    # The single model, optimizer and scheduler of a trial, as in Determined 0.13

    def get_model(self) -> torch.nn.Module:
        """Return the wrapped model of a trial that has one."""
        return _only(self.models, "model")

    def get_optimizer(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer of a trial that has one."""
        return _only(self.optimizers, "optimizer")

    def get_lr_scheduler(self) -> Any:
        """Return the wrapped learning rate scheduler of a trial that has one, None if it has none."""
        return _only(self.lr_schedulers, "learning rate scheduler").scheduler if self.lr_schedulers else None

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

    def get_tensorboard_path(self) -> Any:
        """Return the directory of this run's TensorBoard files, a ``pathlib.Path``."""
        return self.tensorboard.path

    def get_tensorboard_writer(self) -> Any:
        """Return the ``SummaryWriter`` of this run; it is made on the first call."""
        return self.tensorboard.writer

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with ``torch.profiler.profile(*args, **kwargs)``, stepped once per batch.

        Traces go to the directory of the TensorBoard files.
        """
        handler = torch.profiler.tensorboard_trace_handler(str(self.get_tensorboard_path()))
        self.profiler = torch.profiler.profile(*args, on_trace_ready=handler, **kwargs)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _divide_gradients(optimizer: torch.optim.Optimizer, divisor: int) -> None:
    for parameter in _parameters_of(optimizer):
        if parameter.grad is not None:
            parameter.grad.data.div_(float(divisor))


def _only(wrapped: list[Any], what: str) -> Any:
    if len(wrapped) != 1:
        raise errors.InvalidExperimentException(
            f"get_{what.split()[-1]}() is for trials with exactly one wrapped {what}; this one has {len(wrapped)}. "
            f"Keep what the wrap method returned instead."
        )
    return wrapped[0]
