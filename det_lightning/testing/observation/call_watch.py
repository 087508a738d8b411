"""Watches a trial's calls: steps, clipping, seeds, modes, devices and process groups."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from det_lightning.porting.bypass_rules import COLLECTIVES
from det_lightning.pytorch import PyTorchTrialContext
from det_lightning.pytorch._experimental import PyTorchExperimentalContext
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.training.trial_source import find_user_line

#: Functions of ``torch.nn.functional``.
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_OF_TORCH = ("feature_dropout", "native_dropout")
_SEEDING = ((torch, "manual_seed", "set_rng_state"), (random, "seed", "setstate"), (np.random, "seed", "set_state"))
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.utils.data.distributed.DistributedSampler)
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
# Operators that change elements in place, and functions that look as if they did.
_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__")
_LABELLING = ("requires_grad_", "detach_", "share_memory_")
#: Why a change of gradients is a mistake.
TOO_LATE = "changes gradients after the step, when they have no effect; pass clip_grads=... to context.step_optimizer()"
_UNSCALED = "divide them by the scale with scaler.unscale_(optimizer)"
_UNCLEARED = (
    "adds gradients to those of an earlier batch, with which the optimizer has already stepped; leave out "
    "auto_zero_grads=False of context.step_optimizer(), or call zero_grad() in each batch"
)


def _patch(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    before: Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None],
    after: Callable[[], None] | None = None,
) -> None:
    """Let ``before`` see the arguments of each call, and replace them by those it returns."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(*args, **kwargs) or (args, kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            after()
        return result

    patch.setattr(owner, name, watched)


def _collect_parameters(owner: Any) -> set[torch.Tensor]:
    """Return the parameters of an optimizer or a module."""
    if isinstance(owner, nn.Module):
        return set(owner.parameters())
    return {parameter for group in owner.param_groups for parameter in group["params"]}


def _find_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_find_subclasses, cls.__subclasses__()))


class CallWatch(TorchFunctionMode):
    """Notes in the record of ``observer`` which calls the trial makes, by kind, each call of a line once."""

    def __init__(self, observer: Observer, directory: Path) -> None:
        super().__init__()
        self._observer = observer
        self._directory = directory
        self._scales = False  # whether the next backward pass is of a scaled loss
        self._seeded: set[tuple[str, str, str]] = set()  # lines, functions and values
        self._repeated: dict[str, str] = {}  # the first repeated value of each line
        # By parameter: the gradients of a step, and gradients that a backward pass added to them, with its line.
        self._used: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._by_storage: dict[int | None, torch.Tensor] = {}  # parameters by the memory of these gradients
        self._added: dict[torch.Tensor, tuple[torch.Tensor | None, str | None]] = {}

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Watch a training."""
        groups: list[tuple[Any, str, str]] = [
            (dist, name, f"torch.distributed.{name}()") for name in COLLECTIVES if hasattr(dist, name)
        ]
        groups += [(wrapper, "__init__", f"{wrapper.__name__}(...)") for wrapper in _WRAPPERS]
        schedulers = [cls for cls in _find_subclasses(TorchLRScheduler) if "step" in vars(cls)]
        with contextlib.ExitStack() as undo, pytest.MonkeyPatch.context() as patch, self:
            undo.enter_context(register_optimizer_step_pre_hook(self._before_step))
            undo.enter_context(register_optimizer_step_post_hook(self._after_step))
            undo.callback(register_module_forward_pre_hook(lambda module, _: self._observer.enter(module)).remove)
            _patch(patch, torch.Tensor, "backward", self._before_backward, self._after_backward)
            _patch(patch, torch.amp.GradScaler, "scale", self._scale)
            for name in ("unscale_", "step"):
                _patch(patch, torch.amp.GradScaler, name, self._unscale)
            _patch(patch, nn.Module, "train", self._switch)
            _patch(patch, PyTorchTrialContext, "wrap_model", self._observer.note_wrapped)
            for context in (PyTorchTrialContext, PyTorchExperimentalContext):
                _patch(patch, context, "wrap_reducer", self._observer.note_reducer)
            for module, name in itertools.product((nn.utils, nn.utils.clip_grad), _CLIPS):
                _patch(patch, module, name, functools.partial(self._clip, name))
            for library, seed, restore in _SEEDING:
                call = f"{library.__name__}.{seed}("
                _patch(patch, library, seed, functools.partial(self._seed, call))
                _patch(patch, library, restore, functools.partial(self._restore, call))
            for scheduler in schedulers:
                _patch(patch, scheduler, "step", self._step_scheduler)
            for owner, name, call in groups:
                _patch(patch, owner, name, lambda *_, call=call, **__: self._note("process group", call))
            for of in (torch.optim.Optimizer, nn.Module):
                _patch(patch, of, "zero_grad", self._clear)
            yield

    def _line(self) -> str | None:
        return find_user_line(self._directory, beyond_context=True)

    def _note(self, kind: str, call: str) -> None:
        if (line := self._line()) is not None:
            self._observer.note_call(kind, f"{line}: {call}")

    def _seed(self, call: str, *args: Any, **kwargs: Any) -> None:
        """Note a seed that is set to an earlier value during training, so that the same numbers are drawn again."""
        if self._observer.weights_before and (line := self._line()) is not None:
            value = ", ".join(map(repr, [*args, *kwargs.values()]))
            if (line, call, value) in self._seeded:
                self._repeated.setdefault(f"{line}: {call}", value)
                self._observer.note_call("seed", f"{line}: {call}{self._repeated[f'{line}: {call}']})")
            self._seeded.add((line, call, value))

    def _restore(self, call: str, *args: Any, **kwargs: Any) -> None:
        """Forget seeds if the trial restores the random state, as ``torch.random.fork_rng()`` does."""
        if self._line() is not None:
            self._seeded = {seeding for seeding in self._seeded if seeding[1] != call}

    def _before_backward(self, *args: Any, **kwargs: Any) -> None:
        self._note("action", "loss.backward() should be context.backward(loss)")
        self._observer.note_frozen()
        self._observer.is_scaled |= self._scales  # torch calls backward() again for the functions that it overrides
        self._scales = False
        self._used = {p: used for p, used in self._used.items() if self._is_of_step(p) and used[0].any()}

    def _after_backward(self) -> None:
        self._observer.is_scaled = False
        line = find_user_line(self._directory)
        self._added |= {p: (p.grad, line) for p in self._used if not self._is_of_step(p)}

    def _is_of_step(self, parameter: torch.Tensor) -> bool:
        """Return whether the gradient of a parameter is still that of the last step."""
        gradient, version = self._used.get(parameter, (None, 0))
        return gradient is not None and parameter.grad is gradient and gradient._version == version

    def _scale(self, scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        self._scales = scaler.is_enabled()

    def _unscale(self, _: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        self._observer.scaled -= _collect_parameters(optimizer)

    def _clip(self, name: str, parameters: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        advice = (
            f"pass clip_grads=lambda parameters: torch.nn.utils.{name}(parameters, ...) to context.step_optimizer()"
        )
        if all(p.grad is None or self._is_of_step(p) for p in parameters):
            when = "before the backward pass or after the step, when there is nothing to clip"
            self._note("gradient", f"{name}() clips {when}; {advice}")
        elif not self._observer.scaled.isdisjoint(parameters):
            self._note("gradient", f"{name}() clips gradients of a scaled loss: {_UNSCALED} first")
        else:
            self._note("clip", f"{name}() clips the gradients of one batch; {advice}")
        return (parameters, *args), kwargs

    def _clear(self, owner: Any, *args: Any, **kwargs: Any) -> None:
        gradients = [parameter.grad for parameter in _collect_parameters(owner) if parameter.grad is not None]
        if self._line() is not None and any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients):
            self._note("clear", f"zero_grad() of {type(owner).__name__}")

    def _after_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        self._observer.note_step(self._line())
        for parameter in _collect_parameters(optimizer):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self._used[parameter] = (parameter.grad, parameter.grad._version)
                self._by_storage[_find_storage(parameter.grad)] = parameter

    def _before_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        context = self._observer.context
        parameters = _collect_parameters(optimizer)
        if context is None or parameters.isdisjoint(self._observer.collect_trained()):
            return  # such as an optimizer of the inputs
        self._observer.keep_gradients(parameters)
        self._observer.note_gradients(optimizer)
        for added, line in (self._added.pop(p) for p in parameters & self._added.keys() if p.grad is self._added[p][0]):
            if added is not None and added.any():
                self._observer.note_call("gradient", f"{line}: {_UNCLEARED}")
        kind = type(optimizer).__name__
        if not self._observer.scaled.isdisjoint(parameters):
            text = (
                f"{kind} steps with gradients of a scaled loss, which are too large by the scale: pass the scaler to "
            )
            line = find_user_line(self._directory)
            self._observer.note_call("gradient", f"{line}: {text}context.step_optimizer(..., scaler=scaler)")
            self._observer.scaled -= parameters
        found = f"step() of {kind} should be context.step_optimizer(optimizer)"
        if not any(optimizer is wrapped for wrapped in context.optimizers):
            advice = "pass it through context.wrap_optimizer() and step it with context.step_optimizer()"
            found = f"steps a {kind} that is not wrapped; {advice}"
        self._note("action", found)

    def _step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        context = self._observer.context
        for wrapped in [] if context is None else context.lr_schedulers:
            if wrapped.scheduler is scheduler and wrapped.step_mode is not LRScheduler.StepMode.MANUAL_STEP:
                self._note(
                    "action",
                    f"step() of {type(scheduler).__name__}, which the training loop steps too "
                    f"({wrapped.step_mode.name}), so that it is stepped twice; leave the call out, or wrap it with "
                    "LRScheduler.StepMode.MANUAL_STEP",
                )

    def _switch(self, module: nn.Module, mode: bool = True) -> None:
        if (line := self._line()) is not None:
            self._observer.switch(module, mode, line)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        named = _find_device(name, args, given)
        if named is not None and named.type not in ("cpu", "meta"):
            own = getattr(self._observer.context, "device", None)
            if own is None or own.type != named.type or named.index not in (None, own.index):
                self._note("device", str(named))
        result = func(*args, **given)
        if name in _OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in _LABELLING):
            self._find_changed(name, *args[:1])
        if self._observer.evaluating is not None and (layer := _find_training_layer(name, args, given)):
            line = find_user_line(self._directory) or "a line outside of the trial's files"
            self._observer.note_layer(f"{line}: {layer}", _is_of_training_module())
        return result

    def _find_changed(self, name: str, changed: Any = None) -> None:
        """Note an in-place change, other than clearing, of gradients with which an optimizer has already stepped."""
        storages = {_find_storage(part) for part in (changed if isinstance(changed, list | tuple) else [changed])}
        used = {p: self._used[p][0] for p in map(self._by_storage.get, storages) if p in self._used}
        if any(parameter.grad is gradient and gradient.any() for parameter, gradient in used.items()):
            self._note("gradient", f"{name}() {TOO_LATE}")


def _find_storage(value: Any) -> int | None:
    """Return the address of a tensor's memory; None for any value without memory of its own."""
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    return value.data_ptr() or None if is_strided else None


def _find_device(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that a call of a function of torch names."""
    if function == "cuda":
        index = args[1] if len(args) > 1 else kwargs.get("device")
        return torch.device("cuda", index) if isinstance(index, int) else torch.device("cuda")
    for candidate in (kwargs.get("device"), *(args[1:2] if function == "to" else ())):
        if isinstance(candidate, torch.device):
            return candidate
        if isinstance(candidate, str) and candidate.partition(":")[0] in ("cuda", "cpu", "mps", "xpu"):
            return torch.device(candidate)
    return None


def _find_training_layer(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the layer that a call of a function of torch runs as in training, if any."""
    # Functions of torch also take the probability and the mode by position.
    probability, training = (*args[1:3], *(None,) * 2)[:2]
    training = kwargs.get("training", kwargs.get("train", training))
    is_dropout = function.rstrip("_") in (*DROPOUTS, *_OF_TORCH) and training and kwargs.get("p", probability) != 0
    if is_dropout or (function == "scaled_dot_product_attention" and kwargs.get("dropout_p")):
        return "dropout"
    statistics = (*args[1:2], kwargs.get("running_mean"))
    if function == "batch_norm" and kwargs.get("training") and any(known is not None for known in statistics):
        return "batch norm"
    return None


def _is_of_training_module() -> bool:
    """Return whether the innermost module that is being called is in training mode."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(inspect.currentframe()))
    return next((owner.training for owner in owners if isinstance(owner, nn.Module)), False)
