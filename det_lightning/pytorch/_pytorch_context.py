"""The context of a trial: what it wraps its models in, and what it trains through."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from det_lightning import errors
from det_lightning.core.distributed import DistributedContext
from det_lightning.distributed.backend import Backend, parameters_of
from det_lightning.hyperparameters import chosen_hparams
from det_lightning.pytorch._data import to_device
from det_lightning.pytorch._position import PositionName, TrainingPosition
from det_lightning.pytorch._tensorboard import TensorBoardOutput, default_directory
from det_lightning.pytorch._wrapping import WrappingContext

__all__ = ["PyTorchTrialContext"]

logger = logging.getLogger("det_lightning.pytorch")

ClipGrads = Callable[[Any], Any]


class PyTorchTrialContext(WrappingContext):
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
        settings = {"hparams": hparams, "exp_conf": exp_conf, "trial_seed": trial_seed}
        super().__init__(settings, distributed, backend, average_aggregated_gradients, loading_only)
        if aggregation_frequency < 1:
            raise ValueError(f"aggregation_frequency must be at least 1; got {aggregation_frequency}.")
        self.aggregation_frequency = aggregation_frequency
        self.profiler: Any = None
        self.position = TrainingPosition()
        self._tensorboard_path = pathlib.Path(tensorboard_path) if tensorboard_path else default_directory()
        # A test may put another method in the place of this one.
        self.tensorboard = TensorBoardOutput(enable_tensorboard_logging, lambda: self.get_tensorboard_path())
        #: Called with the parameters before each optimizer step (the callbacks of Determined 0.13).
        self.before_step: list[Callable[[Iterable[torch.nn.Parameter]], None]] = []
        self.optimizer_steps = 0
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
        self.precision.backward(loss, gradient, retain_graph, create_graph)

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
            if not self.is_update_batch():
                return
        self.precision.synchronize(optimizer)
        if frequency > 1 and self._averages[optimizer]:
            _divide_gradients(optimizer, frequency)
        if clip_grads is not None or self.before_step:
            self._before_step(optimizer, clip_grads)
        self.precision.step(optimizer, scaler)
        self.optimizer_steps += 1
        if auto_zero_grads:
            optimizer.zero_grad()

    def _before_step(self, optimizer: torch.optim.Optimizer, clip_grads: ClipGrads | None) -> None:
        self.precision.unscale(optimizer)
        parameters = parameters_of(optimizer)
        if clip_grads is not None:
            clip_grads(parameters)
        for hook in self.before_step:
            hook(parameters)

    def is_update_batch(self) -> bool:
        """Tell whether the current batch closes an aggregation, so that optimizers step on it."""
        return self._loading_only or (self.current_train_batch() + 1) % self.aggregation_frequency == 0

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

    @property
    def _aggregation_frequency(self) -> int:
        return self.aggregation_frequency

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
