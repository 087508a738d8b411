"""The wrapped models, optimizers and schedulers of a trial, what it forgot to wrap, and the hooks around updates.

Change here: a new point in a backward pass or an update; ``adapters/hooks.py`` connects Lightning's hooks and flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, TypeVar

import torch

from det_lightning import errors
from det_lightning.arguments import require
from det_lightning.distributed.backend import Backend, list_parameters
from det_lightning.precision import ChosenPrecision
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._settings import TrialSettings
from det_lightning.ranks.distributed_context import DistributedContext

_T = TypeVar("_T")
_MOST_NAMES = 5
_OptimizerHooks = list[Callable[[torch.optim.Optimizer], Any]]
_WAY_OUT = (
    "Every rank must build the same trial: nothing in its __init__ may depend on the rank, or on random numbers that "
    "are not seeded alike."
)


class WrappedParts:
    """Models, optimizers and learning rate schedulers, prepared for training while the trial wraps them.

    Without a ``backend`` models stay on the device where the trial creates them. ``averages`` says for each optimizer
    whether aggregated gradients are divided by the number of batches. Once ``is_complete``, nothing else is wrapped.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        backend: Backend | None,
        precision: ChosenPrecision,
        settings: TrialSettings,
    ) -> None:
        self._distributed = distributed
        self._backend = backend
        self.precision = precision
        self._settings = settings
        self.models = precision.models
        self.optimizers = precision.optimizers
        self.lr_schedulers: list[LRScheduler] = []
        self.averages: dict[torch.optim.Optimizer, bool] = {}
        self.is_complete = False
        #: The parameters, and whether each required a gradient when training began.
        self.required_grad: list[tuple[torch.nn.Parameter, bool]] = []

    def begin_training(self, changes: Mapping[int, bool]) -> None:
        """Note which parameters are frozen, then repeat the ``changes`` that an interrupted run has made since."""
        self.required_grad = [(p, p.requires_grad) for model in self.models for p in model.parameters()]
        for position, flag in changes.items():
            if position < len(self.required_grad):
                self.required_grad[position][0].requires_grad_(flag)

    def _require_open(self, method: str) -> None:
        if self.is_complete:
            raise errors.InvalidExperimentException(
                f"{method}() was called while the trial is trained, as in train_batch(). No checkpoint and no other "
                "rank would have the wrapped part; wrap everything in the trial's __init__."
            )

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        self._require_open("wrap_model")
        advice = "Wrap each model by itself."
        require(isinstance(model, torch.nn.Module), "wrap_model()", "a torch.nn.Module", model, advice)
        self.precision.require_no_levels("wrap_model")
        if self._backend is not None:
            if self._distributed.size > 1:
                weights = sum(parameter.numel() for parameter in model.parameters())
                self._require_same(f"wraps model {len(self.models)}, a {type(model).__name__} with {weights} weights")
            self.precision.whole_models.cast(model)
            model = self._backend.placement.wrap_model(model)
        model = self.precision.surround(model)
        self.models.append(model)
        return model

    def wrap_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        backward_passes_per_step: int = 1,
        fp16_compression: bool | None = None,
        average_aggregated_gradients: bool | None = None,
    ) -> torch.optim.Optimizer:
        self._require_open("wrap_optimizer")
        is_optimizer = hasattr(optimizer, "param_groups") and not isinstance(optimizer, type)
        advice = "Wrap each optimizer by itself."
        require(is_optimizer, "wrap_optimizer()", "an optimizer of torch", optimizer, advice)
        call = "wrap_optimizer(backward_passes_per_step=...)"
        require(isinstance(backward_passes_per_step, Number), call, "a number", backward_passes_per_step)
        self.precision.require_no_levels("wrap_optimizer")
        if backward_passes_per_step < 1:
            raise errors.InvalidExperimentException(
                f"wrap_optimizer(backward_passes_per_step=...) must be at least 1; got {backward_passes_per_step}."
            )
        if fp16_compression is None:
            fp16_compression = bool(self._settings.section("optimizations").get("gradient_compression"))
        if average_aggregated_gradients is None:
            average_aggregated_gradients = self._settings.average_aggregated_gradients
        if self._backend is not None:
            optimizer = self._backend.placement.wrap_optimizer(
                optimizer, backward_passes_per_step=backward_passes_per_step, fp16_compression=fp16_compression
            )
        self.averages[optimizer] = average_aggregated_gradients
        self.optimizers.append(optimizer)
        return optimizer

    def wrap_lr_scheduler(self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1) -> Any:
        self._require_open("wrap_lr_scheduler")
        is_scheduler = hasattr(lr_scheduler, "state_dict") and not isinstance(
            lr_scheduler, type | torch.optim.Optimizer
        )
        call = "wrap_lr_scheduler()"
        require(is_scheduler, call, "a learning rate scheduler and a step_mode, in this order", lr_scheduler)
        require(isinstance(frequency, Number), "wrap_lr_scheduler(frequency=...)", "a number", frequency)
        plateau = isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if plateau and step_mode is not LRScheduler.StepMode.MANUAL_STEP:
            raise errors.InvalidExperimentException(
                f"ReduceLROnPlateau was wrapped with step_mode={step_mode}, but step() needs a metric. Use "
                "LRScheduler.StepMode.MANUAL_STEP and call step(metrics[...]) in the on_validation_end of a callback."
            )
        optimizer = getattr(lr_scheduler, "optimizer", None)
        if optimizer is not None and optimizer not in self.optimizers:
            raise errors.InvalidExperimentException(
                f"{type(lr_scheduler).__name__} got an optimizer ({type(optimizer).__name__}) that was not wrapped. "
                "Build the scheduler from the optimizer that wrap_optimizer() returned."
            )
        self.lr_schedulers.append(LRScheduler(lr_scheduler, step_mode, frequency))
        return lr_scheduler

    def require_same_on_all_ranks(self) -> None:
        """Raise, on every rank, if the ranks have wrapped different numbers of parts; all ranks must call it."""
        if self._distributed.size > 1:
            has = f"{len(self.models)} model(s), {len(self.optimizers)} optimizer(s)"
            self._require_same(f"trains {has}, {len(self.lr_schedulers)} scheduler(s)")

    def _require_same(self, does: str) -> None:
        """Raise, on every rank, if the ranks are about to do different things, so that one would wait forever.

        A rank at another point in the program may have sent anything.
        """
        found = self._distributed.allgather(does)
        if any(type(theirs) is not str or theirs != does for theirs in found):
            each = "; ".join(f"rank {rank} {theirs!s:.200}" for rank, theirs in enumerate(found))
            raise errors.InvalidExperimentException(f"The ranks have diverged: {each}. {_WAY_OUT}")


def get_only(wrapped: list[_T], what: str) -> _T:
    """Return the only wrapped part of a trial, as in Determined 0.13; otherwise raise an error about ``what``."""
    if len(wrapped) != 1:
        raise errors.InvalidExperimentException(
            f"get_{what.split()[-1]}() is for trials with exactly one wrapped {what}; this trial has {len(wrapped)}. "
            "Keep the result of the wrap method instead."
        )
    return wrapped[0]


@dataclasses.dataclass
class UpdateHooks:
    """Functions that a run adds to a context's ``backward`` and ``step_optimizer``."""

    #: Called with the loss, as passed by the trial.
    before_backward: list[Callable[[torch.Tensor], Any]] = dataclasses.field(default_factory=list)
    after_backward: list[Callable[[], Any]] = dataclasses.field(default_factory=list)
    #: Called after gradients are exchanged and unscaled, unless ``step_optimizer`` is given ``clip_grads``.
    clip: _OptimizerHooks = dataclasses.field(default_factory=list)
    #: Called before ``clip_grads``.
    before_own_clip: _OptimizerHooks = dataclasses.field(default_factory=list)
    #: Called after gradients are exchanged, unscaled and clipped.
    before_step: _OptimizerHooks = dataclasses.field(default_factory=list)
    after_step: list[Callable[[], Any]] = dataclasses.field(default_factory=list)
    #: Called before the context zeroes the gradients of an optimizer.
    before_zero_grad: _OptimizerHooks = dataclasses.field(default_factory=list)

    def __reduce__(self) -> Any:
        """Leave the hooks out of copies: the run belongs to the original context."""
        return type(self), ()

    def clear(self) -> None:
        """Remove all hooks."""
        for functions in vars(self).values():
            functions.clear()


def find_unwrapped_parameters(trial: object, wrapped: WrappedParts) -> Iterator[str]:
    """Yield a message for each wrapped optimizer that updates parameters of no wrapped model."""
    known = {parameter for model in wrapped.models for parameter in model.parameters()}
    known |= {*wrapped.precision.scaling.masters}
    names = dict(_name_parameters(trial))
    for index, optimizer in enumerate(wrapped.optimizers):
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


def find_unwrapped_schedulers(trial: object, wrapped: WrappedParts) -> Iterator[str]:
    """Yield a message for each scheduler of the trial that sets the learning rate of a wrapped optimizer."""
    known = [scheduler.scheduler for scheduler in wrapped.lr_schedulers]
    kept = {
        id(part): (attribute, part)
        for attribute, value in vars(trial).items()
        for part in _list_parts(value)
        if isinstance(part, torch.optim.lr_scheduler.LRScheduler)
    }
    inner = [one for scheduler in (*known, *(part for _, part in kept.values())) for one in _find_inner(scheduler)]
    for one in (*known, *inner):
        kept.pop(id(one), None)
    for index, optimizer in enumerate(wrapped.optimizers):
        for attribute, part in (found for found in kept.values() if found[1].optimizer is optimizer):
            yield (
                f"self.{attribute}, a {type(part).__name__}, sets the learning rate of optimizer {index}, a "
                f"{type(optimizer).__name__}, and is not wrapped: the run does not step the scheduler, and no "
                "checkpoint contains it. Pass the scheduler through context.wrap_lr_scheduler() in __init__."
            )


def _find_inner(scheduler: Any) -> Iterator[torch.optim.lr_scheduler.LRScheduler]:
    """Yield the schedulers inside a scheduler, as in a ``SequentialLR``."""
    for value in getattr(scheduler, "__dict__", {}).values():
        for part in _list_parts(value):
            if isinstance(part, torch.optim.lr_scheduler.LRScheduler):
                yield part
                yield from _find_inner(part)
