"""Small parts of a context: the position in the data, hooks around updates; and how a context forwards to its parts."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from det_lightning import errors

_P = ParamSpec("_P")
_T = TypeVar("_T")
_OptimizerHooks = list[Callable[[torch.optim.Optimizer], Any]]


@dataclasses.dataclass
class TrainingPosition:
    """The batch that is being trained on; indices count from 0 over the whole run.

    ``batch_idx`` is None before the first batch, and ``epoch_len`` before the training loader is built.
    """

    initial_batch: int = 0
    batch_idx: int | None = None
    epoch_len: int | None = None

    def batches_trained(self) -> int:
        """Return the number of batches before the next one, over the whole run."""
        return self.initial_batch if self.batch_idx is None else self.batch_idx + 1

    def epoch_length(self) -> int:
        """Return the number of batches in an epoch; raise an InternalException if it is not known yet."""
        if self.epoch_len is None:
            raise errors.InternalException("The length of an epoch is not known: the training loader is not built.")
        return self.epoch_len

    def current_train_batch(self) -> int:
        """Return the index of the current batch; raise an InternalException before training has started."""
        if self.batch_idx is None:
            raise errors.InternalException("There is no current batch: training has not started.")
        return self.batch_idx

    def current_train_epoch(self) -> int:
        """Return the index of the current epoch, from 0."""
        return self.current_train_batch() // self.epoch_length()

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first of its epoch."""
        return self.current_train_batch() % self.epoch_length() == 0

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last of its epoch."""
        return (self.current_train_batch() + 1) % self.epoch_length() == 0

    def get_initial_batch(self) -> int:
        """Return the index of the first batch of this run: 0, or where the checkpoint that it resumes from stopped."""
        return self.initial_batch


@dataclasses.dataclass
class UpdateHooks:
    """Functions that a context calls in ``backward`` and ``step_optimizer``: none, unless a run adds some."""

    #: Called with the loss, as the trial passed it.
    before_backward: list[Callable[[torch.Tensor], Any]] = dataclasses.field(default_factory=list)
    after_backward: list[Callable[[], Any]] = dataclasses.field(default_factory=list)
    #: Called if the trial does not clip gradients itself, once these are exchanged and unscaled.
    clip: _OptimizerHooks = dataclasses.field(default_factory=list)
    #: Called once gradients are exchanged, unscaled and clipped.
    before_step: _OptimizerHooks = dataclasses.field(default_factory=list)
    after_step: list[Callable[[], Any]] = dataclasses.field(default_factory=list)
    #: Called before the context zeroes the gradients of an optimizer.
    before_zero_grad: _OptimizerHooks = dataclasses.field(default_factory=list)

    def clear(self) -> None:
        """Remove all hooks."""
        for functions in vars(self).values():
            functions.clear()


def forward(part: str, method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Return a method that calls ``method`` of the object in the attribute ``part`` of ``self``.

    It has the signature and documentation of ``method``.
    """
    find_part = operator.attrgetter(part)

    @functools.wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(find_part(self), *args, **kwargs)

    return call


def forward_attribute(part: str, name: str) -> Any:
    """Return a property, readable and settable: the attribute ``name`` of the object in the attribute ``part``."""
    find_part = operator.attrgetter(part)

    def assign(self: Any, value: Any) -> None:
        setattr(find_part(self), name, value)

    return property(operator.attrgetter(f"{part}.{name}"), assign, doc=f"``{part}.{name}``, readable and settable.")
