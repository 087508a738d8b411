"""What a trial does past its context: backward passes, steps, devices, process groups."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.own_code import is_own_file

_OURS = str(Path(__file__).parents[2])
# What of ours calls optimizers, schedulers and backward passes; an optimizer of the user's may call another one.
_ACTING = {"backward", "step", "step_optimizer", "synchronize", "_step_lr_schedulers"}
_COLLECTIVES = {"init_process_group", "barrier", "reduce", "gather", "scatter", "send", "recv", "broadcast",
                "all_reduce", "all_gather", "all_gather_object", "broadcast_object_list"}  # fmt: skip
_WRAPPERS = (
    torch.nn.parallel.DistributedDataParallel,
    torch.nn.DataParallel,
    torch.utils.data.distributed.DistributedSampler,
)


@dataclasses.dataclass
class ContextBypass:
    """What a trial was seen to do, each thing once, with the line where it does it."""

    directory: Path  # of the trial's code
    actions: dict[str, None] = dataclasses.field(default_factory=dict)  # backward passes and steps past the context
    devices: dict[str, None] = dataclasses.field(default_factory=dict)  # devices named by the trial
    process_groups: dict[str, None] = dataclasses.field(default_factory=dict)  # calls into torch.distributed

    @property
    def own_sharding(self) -> bool:
        """Whether the trial shards data itself."""
        return any("DistributedSampler" in seen for seen in self.process_groups)


def _line_of_user(directory: Path) -> str | None:
    """Return ``file:line`` of the user's innermost frame; None where the context acts, though by the user's code.

    Code of other libraries acts for whoever called it.
    """
    line = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS) and file != __file__:
            return None if frame.f_code.co_name in _ACTING else line
        if line is None and is_own_file(file, directory):
            line = f"{Path(file).relative_to(directory)}:{frame.f_lineno}"
        frame = frame.f_back
    return line


def _note_calls(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., None]) -> None:
    """Call ``note`` before the method or function ``name`` of ``owner``, with its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    patch.setattr(owner, name, noting)


@contextlib.contextmanager
def bypasses_noted(bypass: ContextBypass, observer: Observer) -> Iterator[None]:
    """Note in ``bypass`` what the trial of ``observer`` does inside of the block."""
    watch = _Watch(bypass, observer)
    schedulers = {TorchLRScheduler, ReduceLROnPlateau, *_subclasses(TorchLRScheduler)}
    handle = register_optimizer_step_pre_hook(watch.optimizer_step)
    try:
        with pytest.MonkeyPatch.context() as patch, _Devices(watch):
            _note_calls(patch, torch.Tensor, "backward", watch.backward)
            for scheduler in (cls for cls in schedulers if "step" in vars(cls)):
                _note_calls(patch, scheduler, "step", watch.scheduler_step)
            for name in (name for name in _COLLECTIVES if hasattr(dist, name)):
                note = functools.partial(watch.process_group, f"torch.distributed.{name}()")
                _note_calls(patch, dist, name, note)
            for wrapper in _WRAPPERS:
                note = functools.partial(watch.process_group, f"{wrapper.__name__}(...)")
                _note_calls(patch, wrapper, "__init__", note)
            yield
            watch.wrapped_twice()
    finally:
        handle.remove()


def _subclasses(cls: type) -> set[type]:
    direct: list[type] = cls.__subclasses__()
    return {found for subclass in direct for found in (subclass, *_subclasses(subclass))}


class _Watch:
    """Notes calls that are the user's."""

    def __init__(self, bypass: ContextBypass, observer: Observer) -> None:
        self._bypass = bypass
        self._observer = observer

    def _note(self, seen: dict[str, None], what: str) -> None:
        if (line := _line_of_user(self._bypass.directory)) is not None:
            seen[f"{line}: {what}"] = None

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self._note(self._bypass.actions, "loss.backward() should be context.backward(loss)")

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        kind = type(optimizer).__name__
        context = self._observer.context
        if context is not None and any(optimizer is wrapped for wrapped in context.optimizers):
            self._note(self._bypass.actions, f"step() of {kind} should be context.step_optimizer(optimizer)")
        elif context is not None:
            advice = "pass it through context.wrap_optimizer() and step it with context.step_optimizer()"
            self._note(self._bypass.actions, f"steps a {kind} that is not wrapped; {advice}")

    def scheduler_step(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        context = self._observer.context
        for wrapped in [] if context is None else context.lr_schedulers:
            if wrapped.scheduler is scheduler and wrapped.step_mode is not LRScheduler.StepMode.MANUAL_STEP:
                self._note(
                    self._bypass.actions,
                    f"step() of {type(scheduler).__name__}, which the training loop steps too "
                    f"({wrapped.step_mode.name}), so that it is stepped twice; leave the call out, or wrap it with "
                    "LRScheduler.StepMode.MANUAL_STEP",
                )

    def process_group(self, what: str, *args: Any, **kwargs: Any) -> None:
        self._note(self._bypass.process_groups, what)

    def device(self, named: torch.device) -> None:
        context = self._observer.context
        own = torch.device("cpu") if context is None else context.device
        fits = named.type in ("cpu", "meta") or (named.type == own.type and named.index in (None, own.index))
        if not fits:
            self._note(self._bypass.devices, str(named))

    def wrapped_twice(self) -> None:
        context = self._observer.context
        schedulers = [scheduler.scheduler for scheduler in context.lr_schedulers]
        wrapped = {"model": context.models, "optimizer": context.optimizers, "lr_scheduler": schedulers}
        for what, objects in wrapped.items():
            for index, one in enumerate(objects):
                if any(one is other for other in objects[:index]):
                    found = f"context.wrap_{what}() is called twice with the same {type(one).__name__}"
                    self._bypass.actions[found] = None


class _Devices(TorchFunctionMode):
    """Notes the devices that the trial names in calls of torch."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = _device_of(getattr(func, "__name__", ""), args, kwargs or {})
        if named is not None:
            self._watch.device(named)
        return func(*args, **(kwargs or {}))


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


@contextlib.contextmanager
def cleared_gradients_noted(
    directory: Path, observer: Observer, frequency: int, seen: dict[str, None]
) -> Iterator[None]:
    """Note in ``seen`` where the trial clears gradients that an aggregation of ``frequency`` batches has summed."""

    def note(owner: Any, *args: Any, **kwargs: Any) -> None:
        line = _line_of_user(directory)
        if line is not None and observer.batches % frequency and _holds_gradients(owner):
            seen[f"{line}: zero_grad() of {type(owner).__name__}"] = None

    with pytest.MonkeyPatch.context() as patch:
        _note_calls(patch, torch.optim.Optimizer, "zero_grad", note)
        _note_calls(patch, torch.nn.Module, "zero_grad", note)
        yield


def _holds_gradients(owner: Any) -> bool:
    groups = getattr(owner, "param_groups", None)
    parameters = list(owner.parameters()) if groups is None else [p for group in groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients)
