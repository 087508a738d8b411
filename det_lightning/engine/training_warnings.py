"""The warnings of a run, each once: settings, NaN, weights without updates, parts without a wrapper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from det_lightning.checkpoint.format.content import CheckpointContent, TrialState
from det_lightning.core._task import current_task
from det_lightning.distributed.backend import list_parameters
from det_lightning.engine.schedule import Schedule
from det_lightning.escaping import get_logger
from det_lightning.hyperparameters import flatten
from det_lightning.masking import is_masked
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial, original_trial

logger = get_logger(__name__)

_NOT_GIVEN = object()
_MOST_CHARS = 1000


class RunWarnings:
    """A reporter for watching one run; logs each kind of warning at most once, on the chief only."""

    def __init__(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        schedule: Schedule,
    ) -> None:
        self._trial = original_trial(trial)
        self._context = context
        self._schedule = schedule
        self._is_chief = context.distributed.rank == 0
        self._first_batch = 0
        self._steps_before = 0
        self._weights: WeightSums | None = None  # at the beginning, until a change is seen or missed
        self._warned_of_nan = False

    def begin(self, state: TrialState, resume: CheckpointContent | None) -> None:
        """Look at the settings of a run, after the checkpoint, if any, is loaded."""
        self._first_batch = state.batches_trained
        self._steps_before = self._context.optimizer_steps
        if self._is_chief:
            self._weights = WeightSums.take(self._context)
            for message in (
                *find_unwrapped_parameters(self._trial, self._context),
                *find_unwrapped_schedulers(self._trial, self._context),
            ):
                self._warn(message)
        for period in self._schedule.find_periods_below_one():
            self._warn(f"{period} is below 1, and so due every time; leave the period out for never.")
        if resume is not None:
            before = _read_hparams(resume)
            now = self._context.settings.to_plain()["hparams"] or {}
            differences = [] if before is None else [*_list_differences(before, now)]
            if differences:
                self._warn(f"The hparams differ from those of checkpoint {resume.name}: {_join(differences)}.")
        if self._schedule.is_complete(state):
            done = f"{state.batches_trained} batches and {state.epochs_trained} epochs"
            origin = "" if resume is None else f" (checkpoint {resume.name})"
            length = "test_mode" if self._schedule.test_mode else f"max_length={self._schedule.max_length}"
            self._warn(
                f"Nothing is trained: {length} is reached after {done}{origin}. To continue, pass a larger max_length, "
                "which counts from the first batch of the first run."
            )

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        frequency = self._context.aggregation_frequency
        if self._weights is not None and steps_completed // frequency > self._first_batch // frequency:
            if self._context.optimizer_steps == self._steps_before:
                self._warn_of_no_step(steps_completed - self._first_batch, self._weights)
            self._weights = None
        first = steps_completed - len(batch_metrics)
        for name in _find_nan_losses(avg_metrics):
            where = [first + index for index, metrics in enumerate(batch_metrics) if _has_nan(metrics.get(name))]
            since = f", first for batch {where[0]} (the first one is 0)" if where else ""
            self._warn_of_nan(f"The training metric {name!r} is NaN{since}")

    def _warn_of_no_step(self, batches: int, weights: WeightSums) -> None:
        """Warn of a trial without ``step_optimizer``, if the trial then leaves anything out."""
        method = f"{type(self._trial).__name__}.train_batch()"
        if weights == WeightSums.take(self._context):
            self._warn(
                f"{method} did not call context.step_optimizer() in the first {batches} batches, and no weights were "
                "updated. Call step_optimizer() for each optimizer, after context.backward(loss)."
            )
        elif left_out := list(_list_left_out(self._context)):
            self._warn(
                f"{method} updates weights without context.step_optimizer(), which alone would {'; '.join(left_out)}. "
                "Call step_optimizer() for each optimizer in place of optimizer.step(), or do this in the trial."
            )

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        for name in _find_nan_losses(metrics):
            self._warn_of_nan(f"The validation metric {name!r} is NaN after {steps_completed} batches")

    def _warn_of_nan(self, found: str) -> None:
        if not self._warned_of_nan:
            self._warned_of_nan = True
            self._warn(
                f"{found}. Updates with NaN make weights NaN too. Try a smaller learning rate or clip_grads=, and look "
                "for NaN in the data. There is no further warning in this run."
            )

    def report_cut_validation(self, steps_completed: int, batches: int) -> None:
        """Say that a try left out the rest of a validation, in an experiment also to its runner."""
        message = f"This try left out the validation after its first {batches} batches: there are no metrics."
        self._warn(message)
        if self._is_chief and (task := current_task()) is not None:
            task.report("message", steps_completed, {"text": message})

    def _warn(self, message: str) -> None:
        if self._is_chief:
            logger.warning("%s", message)


def _list_left_out(context: PyTorchTrialContext) -> Iterator[str]:
    """Yield the work of the context in ``step_optimizer`` for this run, besides the step."""
    if context.aggregation_frequency > 1:
        yield f"update the weights only once in {context.aggregation_frequency} batches (aggregation_frequency)"
    if context.distributed.size > 1:
        yield (
            f"exchange between the {context.distributed.size} processes those gradients that a backward pass does not"
        )
    scaler: Any = context.scaler
    scales_without_steps = scaler is not None and scaler.is_enabled() and not scaler.state_dict()["_growth_tracker"]
    if context.precision.scales_losses or scales_without_steps:
        yield "undo the scaling of the loss in the gradients, and skip steps whose gradients overflow"
    if context.update_hooks.clip or context.update_hooks.before_step:
        yield "clip gradients, and call what runs before a step, such as on_before_optimizer_step()"


def _find_nan_losses(metrics: dict[str, Any]) -> list[str]:
    return [name for name, value in metrics.items() if "loss" in str(name).lower() and _has_nan(value)]


def _has_nan(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "f" and bool(np.isnan(value).any())


def _read_hparams(content: CheckpointContent) -> dict[str, Any] | None:
    """Return the hyperparameters in a checkpoint; None if unknown."""
    settings = None if content.resume is None else content.resume.settings
    for source in (settings, content.load_data):
        found = (source or {}).get("hparams")
        if isinstance(found, dict):
            return found
    return None


def _list_differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    old = flatten(before)
    new = flatten(now)
    for name in dict.fromkeys([*old, *new]):
        was = old.get(name, _NOT_GIVEN)
        is_now = new.get(name, _NOT_GIVEN)
        # NaN is not equal to itself. A mask of an earlier release may stand for the same value.
        if was != is_now and repr(was) != repr(is_now) and not is_masked(was):
            yield f"{name} was {_format_value(was)}, and is {_format_value(is_now)}"


def _format_value(value: Any) -> str:
    return "not given" if value is _NOT_GIVEN else f"{value!r:.100}"


def _join(parts: list[str]) -> str:
    text = "; ".join(parts)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} ... ({len(parts)} in all)"


_MOST_NAMES = 5


@dataclasses.dataclass(frozen=True)
class WeightSums:
    """The sum of each parameter in the models or optimizers of a trial: changed sums show changed weights."""

    sums: list[float]

    @classmethod
    def take(cls, context: PyTorchTrialContext) -> WeightSums:
        """Return the current sums of this rank's parameters."""
        optimized = (parameter for optimizer in context.optimizers for parameter in list_parameters(optimizer))
        found = dict.fromkeys([*_list_parameters(context), *optimized])
        whole = [_get_local_part(parameter) for parameter in found if not (is_lazy(parameter) or parameter.is_meta)]
        # torch adds up no numbers of 8 bits, and MPS has none of 64.
        return cls(
            [
                float(part.sum(dtype=torch.float32 if part.device.type == "mps" else torch.float64))
                for part in whole
                if part.is_floating_point() and part.itemsize > 1
            ]
        )


def _get_local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter on this rank; a sharded parameter has other values elsewhere."""
    values = parameter.detach()
    values = values.to_local() if isinstance(values, DTensor) else values
    return torch.view_as_real(values) if values.is_complex() else values


def _list_parameters(context: PyTorchTrialContext) -> Iterator[torch.nn.Parameter]:
    return (parameter for model in context.models for parameter in model.parameters())


def find_unwrapped_parameters(trial: object, context: PyTorchTrialContext) -> Iterator[str]:
    """Yield a message for each wrapped optimizer that updates parameters of no wrapped model."""
    known = {*_list_parameters(context), *context.precision.scaling.masters}
    names = dict(_name_parameters(trial))
    for index, optimizer in enumerate(context.optimizers):
        unknown = [parameter for parameter in list_parameters(optimizer) if parameter not in known]
        if not unknown:
            continue
        shown = [names.get(parameter, f"one of shape {tuple(parameter.shape)}") for parameter in unknown[:_MOST_NAMES]]
        more = ", ..." if len(unknown) > _MOST_NAMES else ""
        yield (
            f"Optimizer {index}, a {type(optimizer).__name__}, updates {len(unknown)} parameters of no wrapped model: "
            f"{', '.join(shown)}{more}. The parameters are trained, but not saved in checkpoints and not exchanged "
            "between ranks. Pass their model through context.wrap_model() in the trial's __init__."
        )


def _name_parameters(trial: object) -> Iterator[tuple[torch.nn.Parameter, str]]:
    for attribute, value in vars(trial).items():
        if isinstance(value, torch.nn.Parameter):
            yield value, attribute
        for part in _list_parts(value):
            if isinstance(part, torch.nn.Module):
                yield from ((parameter, f"{attribute}.{name}") for name, parameter in part.named_parameters())


def _list_parts(value: Any) -> Iterable[Any]:
    """Return an attribute of a trial, or the items of a list, a tuple or a dict."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def find_unwrapped_schedulers(trial: object, context: PyTorchTrialContext) -> Iterator[str]:
    """Yield a message for each scheduler of the trial that sets the learning rate of a wrapped optimizer."""
    wrapped = [scheduler.scheduler for scheduler in context.lr_schedulers]
    kept = {
        id(part): (attribute, part)
        for attribute, value in vars(trial).items()
        for part in _list_parts(value)
        if isinstance(part, LRScheduler)
    }
    inner = [one for scheduler in (*wrapped, *(part for _, part in kept.values())) for one in _find_inner(scheduler)]
    for one in (*wrapped, *inner):
        kept.pop(id(one), None)
    for index, optimizer in enumerate(context.optimizers):
        for attribute, part in (found for found in kept.values() if found[1].optimizer is optimizer):
            yield (
                f"self.{attribute}, a {type(part).__name__}, sets the learning rate of optimizer {index}, a "
                f"{type(optimizer).__name__}, and is not wrapped: the run does not step the scheduler, and no "
                "checkpoint contains it. Pass the scheduler through context.wrap_lr_scheduler() in __init__."
            )


def _find_inner(scheduler: Any) -> Iterator[LRScheduler]:
    """Yield the schedulers inside a scheduler, as in a ``SequentialLR``."""
    for value in getattr(scheduler, "__dict__", {}).values():
        for part in _list_parts(value):
            if isinstance(part, LRScheduler):
                yield part
                yield from _find_inner(part)
