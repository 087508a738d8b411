"""Watching what a trial does past its context: backward passes, steps, devices, process groups."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from det_lightning.pytorch.lr_scheduler import LRScheduler
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.observation.patching import replaced
from det_lightning.testing.training.trial_source import is_own_file

__all__ = ["ContextBypass", "clearing_of_gradients", "watching_context"]

_OURS = str(Path(__file__).parents[2])
# What of ours calls optimizers, schedulers and backward passes; an optimizer of the user's may call another one.
_ACTING = {"backward", "step", "step_optimizer", "synchronize", "_step_lr_schedulers"}

_COLLECTIVES = (
    "init_process_group",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
)
_WRAPPERS = (
    (torch.nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
    (torch.nn.DataParallel, "DataParallel"),
    (torch.utils.data.distributed.DistributedSampler, "DistributedSampler"),
)


@dataclasses.dataclass
class ContextBypass:
    """What a trial was seen to do, each thing once, with the line where it does it.

    Attributes:
        directory: of the trial's code.
        past_context: backward passes and steps past the context.
        devices: devices named by the trial.
        process_groups: calls into ``torch.distributed``.
    """

    directory: Path
    past_context: dict[str, None] = dataclasses.field(default_factory=dict)
    devices: dict[str, None] = dataclasses.field(default_factory=dict)
    process_groups: dict[str, None] = dataclasses.field(default_factory=dict)

    @property
    def own_sharding(self) -> bool:
        """Whether the trial shares out data itself."""
        return any("DistributedSampler" in seen for seen in self.process_groups)

    def line_of_user(self) -> str | None:
        """Return ``file:line`` of the user's innermost frame; None where the context acts, though by the user's code.

        Code of other libraries acts for whoever called it.
        """
        line = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(_OURS) and file != __file__:
                return None if frame.f_code.co_name in _ACTING else line
            if line is None and is_own_file(file, self.directory):
                line = f"{Path(file).relative_to(self.directory)}:{frame.f_lineno}"
            frame = frame.f_back
        return line


@contextlib.contextmanager
def watching_context(bypass: ContextBypass, observer: Observer) -> Iterator[None]:
    """Note in ``bypass`` what the trial of ``observer`` does inside of the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_backward_passes(bypass))
        stack.enter_context(_optimizer_steps(bypass, observer))
        stack.enter_context(_scheduler_steps(bypass, observer))
        stack.enter_context(_process_groups(bypass))
        stack.enter_context(_Devices(bypass, observer))
        yield
        _note_wrapped_twice(bypass, observer.context)


def _note_wrapped_twice(bypass: ContextBypass, context: Any) -> None:
    wrapped = {
        "wrap_model": context.models,
        "wrap_optimizer": context.optimizers,
        "wrap_lr_scheduler": [scheduler.scheduler for scheduler in context.lr_schedulers],
    }
    for method, objects in wrapped.items():
        for index, one in enumerate(objects):
            if any(one is other for other in objects[:index]):
                bypass.past_context[f"context.{method}() is called twice with the same {type(one).__name__}"] = None


def _noted(owner: Any, name: str, note: Callable[..., None]) -> contextlib.AbstractContextManager[None]:
    """Call ``note`` before the method or function ``name`` of ``owner``, with its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    return replaced(owner, name, noting)


def _backward_passes(bypass: ContextBypass) -> contextlib.AbstractContextManager[None]:
    def note(*args: Any, **kwargs: Any) -> None:
        line = bypass.line_of_user()
        if line is not None:
            bypass.past_context[f"{line}: loss.backward() should be context.backward(loss)"] = None

    return _noted(torch.Tensor, "backward", note)


@contextlib.contextmanager
def _optimizer_steps(bypass: ContextBypass, observer: Observer) -> Iterator[None]:
    def note(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        line, kind = bypass.line_of_user(), type(optimizer).__name__
        if line is None or observer.context is None:
            return
        if any(optimizer is wrapped for wrapped in observer.context.optimizers):
            bypass.past_context[f"{line}: step() of {kind} should be context.step_optimizer(optimizer)"] = None
        else:
            bypass.past_context[
                f"{line}: steps a {kind} that is not wrapped; pass it through context.wrap_optimizer() and step it "
                "with context.step_optimizer()"
            ] = None

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _scheduler_steps(bypass: ContextBypass, observer: Observer) -> Iterator[None]:
    def note(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        line = bypass.line_of_user()
        for wrapped in observer.context.lr_schedulers if line and observer.context is not None else ():
            if wrapped.scheduler is scheduler and wrapped.step_mode is not LRScheduler.StepMode.MANUAL_STEP:
                bypass.past_context[
                    f"{line}: step() of {type(scheduler).__name__}, which the training loop steps too "
                    f"({wrapped.step_mode.name}), so that it is stepped twice; leave the call out, or wrap it with "
                    "LRScheduler.StepMode.MANUAL_STEP"
                ] = None

    with contextlib.ExitStack() as stack:
        for cls in {TorchLRScheduler, ReduceLROnPlateau, *_subclasses(TorchLRScheduler)}:
            if "step" in vars(cls):
                stack.enter_context(_noted(cls, "step", note))
        yield


def _subclasses(cls: type) -> set[type]:
    direct: list[type] = cls.__subclasses__()
    return {found for subclass in direct for found in (subclass, *_subclasses(subclass))}


@contextlib.contextmanager
def _process_groups(bypass: ContextBypass) -> Iterator[None]:
    def noting(what: str) -> Callable[..., None]:
        def note(*args: Any, **kwargs: Any) -> None:
            line = bypass.line_of_user()
            if line is not None:
                bypass.process_groups[f"{line}: {what}"] = None

        return note

    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(_noted(dist, name, noting(f"torch.distributed.{name}()")))
        for cls, name in _WRAPPERS:
            stack.enter_context(_noted(cls, "__init__", noting(f"{name}(...)")))
        yield


class _Devices(TorchFunctionMode):
    """Notes the devices that the trial names in calls of torch."""

    def __init__(self, bypass: ContextBypass, observer: Observer) -> None:
        super().__init__()
        self._conduct = bypass
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = _device_of(getattr(func, "__name__", ""), args, kwargs)
        if named is not None:
            self._note(named)
        return func(*args, **kwargs)

    def _note(self, named: torch.device) -> None:
        own = self._observer.context.device if self._observer.context is not None else torch.device("cpu")
        fits = named.type in ("cpu", "meta") or (named.type == own.type and named.index in (None, own.index))
        line = None if fits else self._conduct.line_of_user()
        if line is not None:
            self._conduct.devices[f"{line}: {named}"] = None


def _device_of(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    if function == "cuda":
        index = args[1] if len(args) > 1 else kwargs.get("device")
        return torch.device("cuda", index) if isinstance(index, int) else torch.device("cuda")
    candidates = [kwargs.get("device"), *(args[1:2] if function == "to" else ())]
    for candidate in candidates:
        if isinstance(candidate, torch.device):
            return candidate
        if isinstance(candidate, str) and candidate.partition(":")[0] in ("cuda", "cpu", "mps", "xpu"):
            return torch.device(candidate)
    return None


@contextlib.contextmanager
def clearing_of_gradients(directory: Path, observer: Observer, frequency: int, seen: dict[str, None]) -> Iterator[None]:
    """Note in ``seen`` where the trial clears gradients that an aggregation under way has summed.

    Args:
        directory: of the trial's code.
        observer: of the run.
        frequency: number of batches of an update.
        seen: gets a line for each place.
    """
    bypass = ContextBypass(directory)

    def note(owner: Any, *args: Any, **kwargs: Any) -> None:
        line = bypass.line_of_user()
        if line is not None and observer.batches % frequency and _holds_gradients(owner):
            seen[f"{line}: zero_grad() of {type(owner).__name__}"] = None

    with _noted(torch.optim.Optimizer, "zero_grad", note), _noted(torch.nn.Module, "zero_grad", note):
        yield


def _holds_gradients(owner: Any) -> bool:
    groups = getattr(owner, "param_groups", None)
    parameters = list(owner.parameters()) if groups is None else [p for group in groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients)
