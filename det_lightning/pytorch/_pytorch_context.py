"""The context of a trial: wraps models, optimizers and schedulers, runs backward passes and optimizer steps."""

from __future__ import annotations

import functools
import operator
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]  # no public name

from det_lightning import errors
from det_lightning.arguments import is_path, refuse_texts, require, wrong_argument
from det_lightning.core._task import default_directory, remember_run
from det_lightning.core._tensorboard import TensorBoardOutput
from det_lightning.distributed.backend import Backend, LocalBackend, list_parameters
from det_lightning.escaping import get_logger
from det_lightning.hyperparameters import choose_hparams
from det_lightning.precision import ChosenPrecision
from det_lightning.pytorch._data import move
from det_lightning.pytorch._experimental import PyTorchExperimentalContext
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._position import TrainingPosition
from det_lightning.pytorch._reducer import ReducerMethods, ReducerRegistry
from det_lightning.pytorch._settings import RunConfiguration, SettingsLookups, TrialSettings, require_usable
from det_lightning.pytorch._wrapped_parts import UpdateHooks, WrappedParts, get_only
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)


def _forward_attribute(part: str, name: str) -> Any:
    """Return a property that reads and sets the attribute ``name`` of the object in the attribute ``part``."""
    find_part = operator.attrgetter(part)

    def assign(self: Any, value: Any) -> None:
        setattr(find_part(self), name, value)

    return property(operator.attrgetter(f"{part}.{name}"), assign, doc=f"``{part}.{name}``, readable and settable.")


# Labels each call for a profiler, even if none runs; the labels take longer than removing the gradients.
_TORCHS_ZERO_GRAD = torch.optim.Optimizer.zero_grad


class PyTorchTrialContext(SettingsLookups, ReducerMethods):
    """Passed to a trial's ``__init__``; created by ``init()``, ``TrialModule`` or ``CheckpointLoadContext``.

    Most arguments are documented by ``init()``. With ``loading_only``, for weights of a checkpoint or for trying out a
    trial by hand, nothing is placed on a device. ``configuration`` supplies defaults for arguments left out of calls.

    Attributes:
        models, optimizers, lr_schedulers: the wrapped objects, in the order of wrapping.
        device: the device of batches and models.
        distributed: rank and size.

    Example:
        >>> import torch
        >>> import det_lightning as det
        >>> with det.pytorch.init(hparams={"lr": 0.5, "global_batch_size": 8}) as context:
        ...     model = context.wrap_model(torch.nn.Linear(1, 1))
        ...     context.get_hparam("lr"), context.distributed.get_rank(), context.distributed.get_size()
        (0.5, 0, 1)
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
        configuration: RunConfiguration | None = None,
    ) -> None:
        if not loading_only:
            require_usable(hparams, exp_conf)
        require(hparams is None or isinstance(hparams, Mapping), "hparams=", "a dict", hparams)
        require(exp_conf is None or isinstance(exp_conf, Mapping), "exp_conf=", "a dict", exp_conf)
        refuse_texts("init()", enable_tensorboard_logging=enable_tensorboard_logging)
        self.distributed = distributed or DistributedContext()
        size = self.distributed.size
        self.settings = TrialSettings(
            hparams, exp_conf, trial_seed, size, aggregation_frequency, average_aggregated_gradients, configuration
        )
        self.backend = backend or LocalBackend()
        self.device = self.backend.device
        self.precision = ChosenPrecision(self.backend, size, loading_only)
        placing = None if loading_only else self.backend
        self.wrapped = WrappedParts(self.distributed, placing, self.precision, self.settings)
        self.models = self.wrapped.models
        self.optimizers = self.wrapped.optimizers
        self.lr_schedulers = self.wrapped.lr_schedulers
        self.reducers = ReducerRegistry(self.distributed.allgather, size, None if loading_only else self.device)
        self.experimental = PyTorchExperimentalContext(self.precision, self.reducers)
        self.profiler: Any = None
        self.position = TrainingPosition()
        is_right = tensorboard_path is None or is_path(tensorboard_path)
        require(is_right, "init(tensorboard_path=...)", "a path", tensorboard_path)
        self._tensorboard_path = pathlib.Path(tensorboard_path) if tensorboard_path else default_directory()
        # Looked up on each call, because a test may replace the method.
        locate = functools.partial(operator.methodcaller("get_tensorboard_path"), self)
        self.tensorboard = TensorBoardOutput(enable_tensorboard_logging, locate)
        self.update_hooks = UpdateHooks()
        self.optimizer_steps = 0
        self._loading_only = loading_only
        self._stop_requested = False
        self.warned_types: set[type] = set()  # that cannot be moved to the device
        if not loading_only:
            remember_run(self)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> PyTorchTrialContext:
        """Return a context for trying out a trial by hand, as up to Determined 0.19.

        Build the trial and call ``train_batch`` and ``evaluate_batch`` without a run: models stay on the device where
        the trial creates them, and each batch updates the weights. A range among the ``hyperparameters`` of ``config``
        stands for its middle, a ``categorical`` for its first value; others without a value raise a ValueError.
        """
        require(isinstance(config, Mapping), "from_config()", "an experiment configuration as a dict", config)
        seed = (config.get("reproducibility") or {}).get("experiment_seed", 0)
        hparams = choose_hparams(config)
        return PyTorchTrialContext(hparams=hparams, exp_conf=dict(config), trial_seed=seed, loading_only=True)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device and prepare it for training; use the returned model from then on.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``, or while the trial is trained; or the ranks
                wrap different models.
        """
        return self.wrapped.wrap_model(model)

    def wrap_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> torch.optim.Optimizer:
        """Register an optimizer; use the returned optimizer from then on.

        Args:
            optimizer: an optimizer over parameters of wrapped models.
            backward_passes_per_step: number of backward passes per parameter in one batch (used by Horovod).
            fp16_compression: all-reduce gradients in half precision (used by Horovod). Defaults to
                ``optimizations.gradient_compression`` of the experiment configuration.
            average_aggregated_gradients: divide the gradients of an update by the aggregation frequency. Defaults to
                the setting of the context.

        Raises:
            InvalidExperimentException: called after ``configure_apex_amp``, or while the trial is trained; or
                ``backward_passes_per_step`` is below 1.
        """
        return self.wrapped.wrap_optimizer(
            optimizer, backward_passes_per_step, fp16_compression, average_aggregated_gradients
        )

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1) -> Any:
        """Register a learning rate scheduler; return the same scheduler.

        Args:
            lr_scheduler: a scheduler of an optimizer that ``wrap_optimizer`` returned.
            step_mode: when the training loop steps the scheduler.
            frequency: step only every ``frequency``-th time.

        Raises:
            InvalidExperimentException: the optimizer was not wrapped, or a ``ReduceLROnPlateau`` is to be stepped
                automatically, or the trial is already being trained.
            TypeError: ``step_mode`` is not a ``LRScheduler.StepMode``.
        """
        return self.wrapped.wrap_lr_scheduler(lr_scheduler, step_mode, frequency)

    def get_model(self) -> torch.nn.Module:
        """Return the wrapped model of a trial that has exactly one."""
        return get_only(self.models, "model")

    def get_optimizer(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer of a trial that has exactly one."""
        return get_only(self.optimizers, "optimizer")

    def get_lr_scheduler(self) -> Any:
        """Return the wrapped learning rate scheduler of a trial that has exactly one; None if it has none."""
        return get_only(self.lr_schedulers, "learning rate scheduler").scheduler if self.lr_schedulers else None

    def wrap_scaler(self, scaler: Any) -> Any:
        """Register a gradient scaler, so that checkpoints hold the state; the trial does the scaling and the updates.

        Args:
            scaler: a ``torch.amp.GradScaler`` or ``torch.cuda.amp.GradScaler``, to pass to ``step_optimizer`` too.

        Raises:
            InvalidExperimentException: there already is a scaler or a wrapped model, apex is in use, or the precision
                was chosen outside of the trial.
        """
        return self.precision.wrap_scaler(scaler)

    def autocast_forward_pass(self, to_wrap: torch.nn.Module) -> torch.nn.Module:
        """Make a model's forward pass run under autocast, and return float32 in place of half precision.

        The same model is changed and returned, with the same parameters, hooks and attributes. Without a CUDA device
        there is no autocast, as in Determined.
        """
        return self.precision.autocast_forward_pass(to_wrap)

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
        """Configure the precision of models and optimizers by apex's levels; see docs/precision.md.

        Use the returned models and optimizers from then on. On the CPU bfloat16 replaces float16, with a warning.

        Args:
            models: a model that ``wrap_model`` returned, or a list.
            optimizers: an optimizer that ``wrap_optimizer`` returned, or a list.
            enabled: if False, nothing is changed.
            opt_level: ``"O0"`` (float32), ``"O1"`` (autocast), ``"O2"`` (half precision with float32 masters and batch
                norms), ``"O3"`` (half precision).
            cast_model_type: the type of weights and inputs.
            patch_torch_functions: run forward passes under autocast.
            keep_batchnorm_fp32: leave batch norms in float32; may be a string.
            master_weights: make optimizers update float32 copies.
            loss_scale: a number, maybe as a string, or ``"dynamic"``.
            cast_model_outputs: the type of outputs; float32 by default.
            num_losses: number of losses in a batch, with a scaler each; 1 scales all losses alike.
            verbosity: 0 logs nothing.
            min_loss_scale, max_loss_scale: the bounds of a dynamic scale.

        Returns:
            Models and optimizers, each alone or as a list, as given.

        Raises:
            InvalidExperimentException: an argument is wrong, a model or optimizer is not wrapped, an optimizer has no
                parameters of the models, a model is already in half precision; a second call; or torch.amp is in use.
        """
        if not enabled:
            return models, optimizers
        # As in apex, None stands for the level's value.
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
        return self.precision.configure_apex_amp(models, optimizers, opt_level, verbosity, overrides)

    scaler = _forward_attribute("precision", "scaler")
    # Setting this was the only way to give use_amp() a scaler with other arguments.
    _scaler = scaler

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first of an epoch."""
        return self.position.current_train_batch() % self.position.epoch_length() == 0

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last of an epoch."""
        return (self.position.current_train_batch() + 1) % self.position.epoch_length() == 0

    def current_train_epoch(self) -> int:
        """Return the index of the current epoch, from 0."""
        return self.position.current_train_batch() // self.position.epoch_length()

    def current_train_batch(self) -> int:
        """Return the index of the current batch; raise an InternalException before training has started."""
        return self.position.current_train_batch()

    def get_initial_batch(self) -> int:
        """Return the index of the first batch of this run: 0, or the position of the checkpoint resumed from."""
        return self.position.initial_batch

    # Trials read these in their evaluation, and tests that run a trial by hand set them.
    _current_batch_idx = _forward_attribute("position", "batch_idx")
    _epoch_len = _forward_attribute("position", "epoch_len")

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Switch the writing of TensorBoard files on or off.

        Raises:
            AssertionError: the argument is not a bool.
        """
        if not isinstance(enable_tensorboard_logging, bool):
            raise AssertionError(f"set_enable_tensorboard_logging() takes a bool; got {enable_tensorboard_logging!r}.")
        self.tensorboard.enabled = enable_tensorboard_logging

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether metrics are written as TensorBoard files."""
        return self.tensorboard.enabled

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Compute the gradients of ``loss``, of shape ``()`` or the shape of ``gradient``, like ``Tensor.backward``.

        Ranks all-reduce gradients only on batches with an optimizer update.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(wrong_argument("context.backward()", "the loss as a tensor with its graph", loss))
        hooks = self.update_hooks
        for before in hooks.before_backward:
            before(loss)
        try:
            self.precision.path.backward(loss, gradient, retain_graph, create_graph)
        except RuntimeError as error:
            _explain_loss(error, loss, gradient)
            raise
        for after in hooks.after_backward:
            after()

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: Callable[[Any], Any] | None = None,
        auto_zero_grads: bool = True,
        scaler: Any | None = None,
        *,
        backward_passes_per_step: int = 1,
    ) -> None:
        """Update the parameters, on batches that complete an aggregation; do nothing on any other batch.

        Args:
            optimizer: the optimizer that ``wrap_optimizer`` returned.
            clip_grads: a function of the list of the optimizer's parameters, called after gradients are all-reduced.
                Defaults to clipping by ``gradient_clip_val`` of ``pl.Trainer``.
            auto_zero_grads: zero the gradients after the step.
            scaler: step through this gradient scaler.
            backward_passes_per_step: accepted as in Determined 0.13, but ignored; see ``wrap_optimizer``.

        Raises:
            InvalidExperimentException: the optimizer was not wrapped, or ``auto_zero_grads`` is false with aggregation.
            TypeError: ``clip_grads`` is not a function.
        """
        if clip_grads is not None and (not callable(clip_grads) or isinstance(clip_grads, type)):
            raise TypeError(
                f"step_optimizer(clip_grads=...) takes a function of the parameters; got {clip_grads!r}. To clip "
                "their norm: clip_grads=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0)."
            )
        average = self.wrapped.averages.get(optimizer)
        if average is None:
            raise errors.InvalidExperimentException(
                f"step_optimizer() got a {type(optimizer).__name__} that was not wrapped. Pass an optimizer that "
                f"wrap_optimizer() returned; {len(self.optimizers)} optimizer(s) are wrapped."
            )
        frequency = self.settings.aggregation_frequency
        if frequency > 1:
            if not auto_zero_grads:
                raise errors.InvalidExperimentException(
                    f"step_optimizer(auto_zero_grads=False) with aggregation_frequency={frequency}: gradients of "
                    "several batches are summed, so they must be zeroed after each update."
                )
            if not self.is_update_batch():
                return
        path = self.precision.path
        if path.exchanges:
            path.synchronize(optimizer)
        if frequency > 1 and average:
            for gradient in [p.grad for p in list_parameters(optimizer) if p.grad is not None]:
                gradient.data.div_(float(frequency))
        hooks = self.update_hooks
        if clip_grads is not None or hooks.before_step or hooks.clip:
            self.precision.scaling.unscale(optimizer)
            if clip_grads is not None:
                for before in hooks.before_own_clip:
                    before(optimizer)
                clip_grads(list_parameters(optimizer))
            else:
                for clip in hooks.clip:
                    clip(optimizer)
            for before in hooks.before_step:
                before(optimizer)
        path.step(optimizer, scaler)
        self.optimizer_steps += 1
        for after in hooks.after_step:
            after()
        if not auto_zero_grads:
            return
        for before_zero in hooks.before_zero_grad:
            before_zero(optimizer)
        of_class = getattr(type(optimizer), "zero_grad", None)
        if of_class is not _TORCHS_ZERO_GRAD or "zero_grad" in vars(optimizer) or profiler_enabled():
            optimizer.zero_grad()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def is_update_batch(self) -> bool:
        """Return whether the current batch completes an aggregation, so that optimizers step."""
        frequency = self.settings.aggregation_frequency
        return self._loading_only or (self.position.current_train_batch() + 1) % frequency == 0

    _should_communicate_and_update = is_update_batch
    aggregation_frequency = property(lambda self: self.settings.aggregation_frequency, doc="Batches in one update.")
    _aggregation_frequency = aggregation_frequency

    def to_device(self, data: Any) -> Any:
        """Move data created by the trial to the device; batches of the loader are moved already."""
        return move(self.device, self.warned_types, data)

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ask the run to end with a checkpoint at the next boundary; raise an AssertionError unless given a bool."""
        if not isinstance(stop_requested, bool):
            raise AssertionError(f"set_stop_requested() takes a bool; got {stop_requested!r}.")
        logger.info("The trial asked to stop: the run ends at the next boundary.")
        self._stop_requested = stop_requested

    def get_stop_requested(self) -> bool:
        """Return whether the trial asked for the run to end."""
        return self._stop_requested

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the directory of this run's TensorBoard files."""
        return self._tensorboard_path

    def get_tensorboard_writer(self) -> Any:
        """Return the ``SummaryWriter`` of this run, created on the first call."""
        return self.tensorboard.writer

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile with ``torch.profiler.profile``, stepped once per batch; traces go to TensorBoard's directory."""
        handler = torch.profiler.tensorboard_trace_handler(str(self.get_tensorboard_path()))
        self.profiler = torch.profiler.profile(*args, on_trace_ready=handler, **kwargs)


def _explain_loss(error: RuntimeError, loss: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Explain torch's error about a loss without gradients in a sentence before it."""
    if not loss.requires_grad:
        problem = "the loss has no graph: it was detached, made under torch.no_grad(), or does not depend on a weight"
    elif loss.dim() > 0 and loss.numel() > 1 and gradient is None:
        problem = f"the loss has the shape {tuple(loss.shape)}, not (): reduce it, as with loss.mean()"
    elif "a second time" in str(error):
        problem = (
            "a part of the loss's graph had a backward pass before: by loss.backward() beside context.backward(), with "
            "a state that is kept from an earlier batch without detach(), or with another loss without "
            "retain_graph=True"
        )
    else:
        return
    error.args = (f"In context.backward(), {problem}. {error}",)
