"""Actions of a trial without its context: backward passes, steps, clipping, seeds, devices, process groups."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from det_lightning.porting.bypass_rules import COLLECTIVES
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.training.trial_source import find_user_line, is_within

_SEEDING = ((torch, "manual_seed", "set_rng_state"), (random, "seed", "setstate"), (np.random, "seed", "set_state"))
_STEPS = {"train_batch", "evaluate_batch", "evaluate_full_dataset"}
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.utils.data.distributed.DistributedSampler)
_UNCLEARED = (
    "adds gradients to those of an earlier batch, with which the optimizer has already stepped; leave out "
    "auto_zero_grads=False of context.step_optimizer(), or call zero_grad() in each batch"
)


def _patch_call(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., None]) -> None:
    """Let ``note`` see the arguments of each call of a function before the function does."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    patch.setattr(owner, name, noting)


def _collect_parameters(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _collect_trained(models: Iterable[Any], trial: Any) -> set[torch.Tensor]:
    """Return the parameters of wrapped models, and of modules and parameters in attributes of the trial."""
    modules = [*models, *(value for value in vars(trial).values() if isinstance(value, nn.Module))]
    alone = {value for value in vars(trial).values() if isinstance(value, nn.Parameter)}
    return alone.union(*(module.parameters() for module in modules))


def _is_unchanged(parameter: torch.Tensor, gradient: torch.Tensor, version: int) -> bool:
    return parameter.grad is gradient and gradient._version == version


def _find_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_find_subclasses, cls.__subclasses__()))


class ContextBypass(TorchFunctionMode):
    """Notes the actions of the trial of ``observer`` beside the context, each call once and with the line."""

    def __init__(self, directory: Path, observer: Observer) -> None:
        super().__init__()
        self.actions: dict[str, None] = {}  # backward passes and steps
        self.twice: dict[str, str] = {}  # objects that the trial wraps twice, by the function that wraps them
        self.devices: dict[str, None] = {}  # devices that the trial names
        self.process_groups: dict[str, None] = {}  # calls into torch.distributed
        self.gradients: dict[str, None] = {}  # clipped before there are any, or of an update that was already made
        self.clips: dict[str, None] = {}  # calls that clip the gradients of one batch
        self.frozen: dict[str, bool] = {}  # lines that freeze parts of wrapped models, and whether training had begun
        self.seeds: dict[str, None] = {}  # calls that set a seed again and again
        self._seeded: set[str] = set()
        self._froze: dict[torch.Tensor, tuple[str, bool]] = {}  # by parameter that is still frozen
        # By parameter: the gradients of a step, and gradients that a backward pass added to them, with its line.
        self._used: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._added: dict[torch.Tensor, tuple[torch.Tensor | None, str | None]] = {}
        self._directory = directory
        self._observer = observer

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Watch a training."""
        names = [name for name in COLLECTIVES if hasattr(dist, name)]
        distributed: list[tuple[Any, str, str]] = [(dist, name, f"torch.distributed.{name}()") for name in names]
        distributed += [(wrapper, "__init__", f"{wrapper.__name__}(...)") for wrapper in _WRAPPERS]
        hooks = contextlib.ExitStack()
        hooks.enter_context(register_optimizer_step_pre_hook(self._before_step))
        hooks.enter_context(register_optimizer_step_post_hook(self._after_step))
        with hooks, pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(torch.Tensor, "backward", self._watch_backward(torch.Tensor.backward))
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                clip = self._watch_clip(name, getattr(nn.utils, name))
                for owner in (nn.utils, nn.utils.clip_grad):
                    patch.setattr(owner, name, clip)
            for library, seed, restore in _SEEDING:
                call = f"{library.__name__}.{seed}("
                _patch_call(patch, library, seed, functools.partial(self._seed, call))
                _patch_call(patch, library, restore, functools.partial(self._restore, call))
            for scheduler in (cls for cls in _find_subclasses(TorchLRScheduler) if "step" in vars(cls)):
                _patch_call(patch, scheduler, "step", self._step_scheduler)
            for owner, name, call in distributed:
                _patch_call(patch, owner, name, lambda *_, call=call, **__: self._note(self.process_groups, call))
            yield
            if self._observer.context is not None:
                self._find_wrapped_twice(self._observer.context)

    def _note(self, seen: dict[str, None], call: str) -> None:
        if (line := find_user_line(self._directory, beyond_context=True)) is not None:
            seen[f"{line}: {call}"] = None

    def _seed(self, call: str, *args: Any, **kwargs: Any) -> None:
        """Note a seed that a batch sets to the value of an earlier batch, so that both draw the same numbers."""
        line = find_user_line(self._directory)
        if line is None or not is_within(self._directory, _STEPS):
            return
        seeding = f"{line}: {call}{', '.join(map(repr, [*args, *kwargs.values()]))})"
        if seeding in self._seeded:
            self.seeds[seeding] = None
        self._seeded.add(seeding)

    def _restore(self, call: str, *args: Any, **kwargs: Any) -> None:
        """Forget the seeds of a batch that restores the random state, as ``torch.random.fork_rng()`` does."""
        if is_within(self._directory, _STEPS):
            self._seeded = {seeding for seeding in self._seeded if call not in seeding}

    def _watch_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            self._note(self.actions, "loss.backward() should be context.backward(loss)")
            self._used = {p: used for p, used in self._used.items() if _is_unchanged(p, *used) and used[0].any()}
            original(*args, **kwargs)
            if self._froze and self._observer.context is not None:
                self._find_frozen(self._observer.context.models)
            line = find_user_line(self._directory)
            self._added |= {p: (p.grad, line) for p, used in self._used.items() if not _is_unchanged(p, *used)}

        return backward

    def _watch_clip(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        advice = (
            f"pass clip_grads=lambda parameters: torch.nn.utils.{name}(parameters, ...) to context.step_optimizer()"
        )

        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if all(p.grad is None or (p in self._used and _is_unchanged(p, *self._used[p])) for p in parameters):
                when = "before the backward pass or after the step, when there is nothing to clip"
                self._note(self.gradients, f"{name}() clips {when}; {advice}")
            else:
                self._note(self.clips, f"{name}() clips the gradients of one batch; {advice}")
            return original(parameters, *args, **kwargs)

        return clip

    def _after_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        for parameter in _collect_parameters(optimizer):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self._used[parameter] = (parameter.grad, parameter.grad._version)

    def _before_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        context = self._observer.context
        parameters = _collect_parameters(optimizer)
        if context is None or parameters.isdisjoint(_collect_trained(context.models, self._observer.trial)):
            return  # such as an optimizer of the inputs
        for added, line in (self._added.pop(p) for p in parameters & self._added.keys() if p.grad is self._added[p][0]):
            if added is not None and added.any():
                self.gradients[f"{line}: {_UNCLEARED}"] = None
        kind = type(optimizer).__name__
        found = f"step() of {kind} should be context.step_optimizer(optimizer)"
        if not any(optimizer is wrapped for wrapped in context.optimizers):
            advice = "pass it through context.wrap_optimizer() and step it with context.step_optimizer()"
            found = f"steps a {kind} that is not wrapped; {advice}"
        self._note(self.actions, found)

    def _step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
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
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        named = _find_device(name, args, given)
        if named is not None and named.type not in ("cpu", "meta"):
            own = getattr(self._observer.context, "device", None)
            if own is None or own.type != named.type or named.index not in (None, own.index):
                self._note(self.devices, str(named))
        is_setter = name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.requires_grad
        if is_setter or name == "requires_grad_":
            self._note_frozen(args[0], (*args[1:], *given.values(), True)[0])
        return func(*args, **given)

    def _note_frozen(self, parameter: torch.Tensor, requires_grad: bool) -> None:
        if requires_grad:
            self._froze.pop(parameter, None)
            return
        models = [] if self._observer.context is None else self._observer.context.models
        is_wrapped = any(parameter is wrapped for model in models for wrapped in model.parameters())
        line = find_user_line(self._directory, beyond_context=True)
        if line is not None and is_wrapped and parameter.requires_grad:
            began = any(event["event"] == "batch_start" for event in self._observer.events)
            self._froze[parameter] = (f"{line}: freezes parameters of a model that context.wrap_model() got", began)

    def _find_frozen(self, models: Iterable[Any]) -> None:
        """Collect the lines that froze parts of models before a backward pass.

        A model without any gradient waits for no other process.
        """
        for model in (model for model in models if any(parameter.requires_grad for parameter in model.parameters())):
            self.frozen |= dict(self._froze[p] for p in model.parameters() if p in self._froze)

    def _find_wrapped_twice(self, context: Any) -> None:
        schedulers = [scheduler.scheduler for scheduler in context.lr_schedulers]
        wrapped = {"model": context.models, "optimizer": context.optimizers, "lr_scheduler": schedulers}
        for kind, objects in wrapped.items():
            for one, other in itertools.combinations(objects, 2):
                if one is other:
                    self.twice[f"wrap_{kind}"] = type(one).__name__


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


class AggregationWatch:
    """Notes steps and cleared gradients of the trial of ``observer`` within an aggregation of ``frequency`` batches."""

    def __init__(self, directory: Path, observer: Observer, frequency: int) -> None:
        self.cleared: dict[str, None] = {}  # lines that clear gradients which an update still needs
        self.steps: dict[int, str | None] = {}  # the batches with a step, and the user's line of a step by hand
        self._directory = directory
        self._observer = observer
        self._frequency = frequency

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Watch a training."""
        step = register_optimizer_step_post_hook(self._after_step)
        with step, pytest.MonkeyPatch.context() as patch:
            _patch_call(patch, torch.optim.Optimizer, "zero_grad", self._clear)
            _patch_call(patch, nn.Module, "zero_grad", self._clear)
            yield

    def _after_step(self, *args: Any) -> None:
        line = find_user_line(self._directory, beyond_context=True)
        self.steps[self._observer.batches] = self.steps.get(self._observer.batches) or line

    def _clear(self, owner: Any, *args: Any, **kwargs: Any) -> None:
        line = find_user_line(self._directory, beyond_context=True)
        if line is None or self._observer.batches % self._frequency == 0:
            return
        parameters = _collect_parameters(owner) if isinstance(owner, torch.optim.Optimizer) else owner.parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.is_sparse or bool(gradient.any()) for gradient in gradients):
            self.cleared[f"{line}: zero_grad() of {type(owner).__name__}"] = None
