"""What a trial does without its context: backward passes, steps, devices, process groups."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from det_lightning.bypass_rules import COLLECTIVES
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.testing.observation.in_place import InPlaceChanges
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.observation.user_lines import find_user_line

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.utils.data.distributed.DistributedSampler)


def _note_calls(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    patch.setattr(owner, name, noting)


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))


class ContextBypass(TorchFunctionMode):
    """Notes what the trial of ``observer`` does without its context, each call once and with its line."""

    def __init__(self, directory: Path, observer: Observer) -> None:
        super().__init__()
        self.actions: dict[str, None] = {}  # backward passes and steps
        self.devices: dict[str, None] = {}  # devices that the trial names
        self.process_groups: dict[str, None] = {}  # calls into torch.distributed
        self.gradients: dict[str, None] = {}  # clipped before there are any, or of an update that was already made
        self.in_place = InPlaceChanges(directory)
        self.clips: dict[str, None] = {}  # calls that clip the gradients of one batch
        self._backward_in = -1  # the batch of the last backward pass
        self._used: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # parameters, gradients stepped with, versions
        self._directory = directory
        self._observer = observer

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        names = [name for name in COLLECTIVES if hasattr(dist, name)]
        distributed: list[tuple[Any, str, str]] = [(dist, name, f"torch.distributed.{name}()") for name in names]
        distributed += [(wrapper, "__init__", f"{wrapper.__name__}(...)") for wrapper in _WRAPPERS]
        hooks = contextlib.ExitStack()
        hooks.enter_context(register_optimizer_step_pre_hook(self._optimizer_step))
        hooks.enter_context(register_optimizer_step_post_hook(self._optimizer_stepped))
        with hooks, pytest.MonkeyPatch.context() as patch, self:
            _note_calls(patch, torch.Tensor, "backward", self._backward)
            for owner, name in itertools.product(
                (nn.utils, nn.utils.clip_grad), ("clip_grad_norm_", "clip_grad_value_")
            ):
                _note_calls(patch, owner, name, functools.partial(self._clip, name))
            for scheduler in (cls for cls in _with_subclasses(TorchLRScheduler) if "step" in vars(cls)):
                _note_calls(patch, scheduler, "step", self._scheduler_step)
            for owner, name, call in distributed:
                _note_calls(patch, owner, name, self._noting(self.process_groups, call))
            yield
            self._note_wrapped_twice()

    def _note(self, seen: dict[str, None], call: str) -> None:
        if (line := find_user_line(self._directory, beyond_context=True)) is not None:
            seen[f"{line}: {call}"] = None

    def _noting(self, seen: dict[str, None], call: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self._note(seen, call)

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        self._note(self.actions, "loss.backward() should be context.backward(loss)")
        self._backward_in = self._observer.batches
        if any(parameter.grad is used and used._version == version and used.any()
               for parameter, used, version in self._used):  # fmt: skip
            line = find_user_line(self._directory)
            self.gradients[
                f"{line}: adds gradients to those of an earlier batch, with which the optimizer has already stepped; "
                "leave out auto_zero_grads=False of context.step_optimizer(), or call zero_grad() in each batch"
            ] = None
        self._used = []

    def _clip(self, name: str, *args: Any, **kwargs: Any) -> None:
        advice = (
            f"pass clip_grads=lambda parameters: torch.nn.utils.{name}(parameters, ...) to context.step_optimizer()"
        )
        if self._backward_in != self._observer.batches:
            self._note(
                self.gradients, f"{name}() clips before the backward pass, when there is nothing to clip; {advice}"
            )
        else:
            self._note(self.clips, f"{name}() clips the gradients of one batch; {advice}")

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._used += [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None and not p.grad.is_sparse]

    def _optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        context = self._observer.context
        if context is None:
            return
        kind = type(optimizer).__name__
        found = f"step() of {kind} should be context.step_optimizer(optimizer)"
        if not any(optimizer is wrapped for wrapped in context.optimizers):
            advice = "pass it through context.wrap_optimizer() and step it with context.step_optimizer()"
            found = f"steps a {kind} that is not wrapped; {advice}"
        self._note(self.actions, found)

    def _scheduler_step(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        context = self._observer.context
        for wrapped in [] if context is None else context.lr_schedulers:
            if wrapped.scheduler is scheduler and wrapped.step_mode is not LRScheduler.StepMode.MANUAL_STEP:
                self._note(
                    self.actions,
                    f"step() of {type(scheduler).__name__}, which the training loop steps too "
                    f"({wrapped.step_mode.name}), so that it is stepped twice; leave the call out, or wrap it with "
                    "LRScheduler.StepMode.MANUAL_STEP",
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.in_place.note(getattr(func, "__name__", ""), args)
        named = _device_of(getattr(func, "__name__", ""), args, kwargs or {})
        if named is not None and named.type not in ("cpu", "meta"):
            own = getattr(self._observer.context, "device", None)
            if own is None or own.type != named.type or named.index not in (None, own.index):
                self._note(self.devices, str(named))
        return func(*args, **(kwargs or {}))

    def _note_wrapped_twice(self) -> None:
        context = self._observer.context
        if context is None:
            return
        schedulers = [scheduler.scheduler for scheduler in context.lr_schedulers]
        wrapped = {"model": context.models, "optimizer": context.optimizers, "lr_scheduler": schedulers}
        for kind, objects in wrapped.items():
            for one, other in itertools.combinations(objects, 2):
                if one is other:
                    self.actions[f"context.wrap_{kind}() is called twice with the same {type(one).__name__}"] = None


def _device_of(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    if function == "cuda":
        index = args[1] if len(args) > 1 else kwargs.get("device")
        return torch.device("cuda", index) if isinstance(index, int) else torch.device("cuda")
    for candidate in (kwargs.get("device"), *(args[1:2] if function == "to" else ())):
        if isinstance(candidate, torch.device):
            return candidate
        if isinstance(candidate, str) and candidate.partition(":")[0] in ("cuda", "cpu", "mps", "xpu"):
            return torch.device(candidate)
    return None


class AggregationWatch:
    """Notes what the trial of ``observer`` does within an aggregation of ``frequency`` batches."""

    def __init__(self, directory: Path, observer: Observer, frequency: int) -> None:
        self.cleared: dict[str, None] = {}  # where gradients are cleared that an update still needs
        self.stepped: set[int] = set()  # the batches in which an optimizer stepped
        self._directory = directory
        self._observer = observer
        self._frequency = frequency

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        step = register_optimizer_step_post_hook(lambda *_: self.stepped.add(self._observer.batches))
        with step, pytest.MonkeyPatch.context() as patch:
            _note_calls(patch, torch.optim.Optimizer, "zero_grad", self._note)
            _note_calls(patch, nn.Module, "zero_grad", self._note)
            yield

    def _note(self, owner: Any, *args: Any, **kwargs: Any) -> None:
        line = find_user_line(self._directory, beyond_context=True)
        if line is None or self._observer.batches % self._frequency == 0:
            return
        groups = getattr(owner, "param_groups", None)
        parameters = owner.parameters() if groups is None else [p for group in groups for p in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients):
            self.cleared[f"{line}: zero_grad() of {type(owner).__name__}"] = None
