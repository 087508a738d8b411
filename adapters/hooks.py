"""Lightning's hooks: those in which a module drives its trial, and those that look at its batches and updates.

The first work even if a subclass overrides them without ``super()``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from det_lightning import errors
from det_lightning.adapters import lightning_internals
from det_lightning.adapters.flags import TakenFlags
from det_lightning.adapters.lightning_package import pl
from det_lightning.engine.events import overrides
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext

# Methods of modules that Lightning's own training calls, and a trial's does not.
_UNUSED_METHODS = {
    "backward": "use on_before_backward() and on_after_backward()",
    "lr_scheduler_step": "wrap a scheduler in the trial, with wrap_lr_scheduler()",
    "on_after_batch_transfer": "change the batch in the trial's train_batch(), or in on_train_batch_start()",
    "on_before_batch_transfer": "change the batch in the trial's dataset, or in the collate_fn of its DataLoader",
    "optimizer_step": "use on_before_optimizer_step(), or step_optimizer() in the trial's train_batch()",
    "optimizer_zero_grad": "use on_before_zero_grad(), or step_optimizer(auto_zero_grads=False) in the trial",
    "transfer_batch_to_device": "move the batch in the trial, after context.experimental.disable_auto_to_device()",
}
# By Lightning's name of a hook, that of the list in which a context keeps it.
_UPDATE_HOOKS = {
    "on_before_backward": "before_backward",
    "on_after_backward": "after_backward",
    "on_before_optimizer_step": "before_step",
    "on_before_zero_grad": "before_zero_grad",
}

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def needed(instead: str = "") -> Callable[[_Hook], _Hook]:
    """Mark a hook that a module cannot do without.

    An override in a subclass that does not call it is followed by it; or an error says what to do ``instead``.
    """

    def mark(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def noted(self: DrivenModule, *args: Any, **kwargs: Any) -> Any:
            self.called_hooks.add(hook.__name__)
            return hook(self, *args, **kwargs)

        noted.instead = instead  # type: ignore[attr-defined]
        return noted  # type: ignore[return-value]

    return mark


def _is_needed(attribute: Any) -> bool:
    return hasattr(attribute, "instead")


class DrivenModule(pl.LightningModule):
    """A module with hooks that are :func:`needed`.

    Attributes:
        called_hooks: the names of the needed hooks that were called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called_hooks: set[str] = set()

    @classmethod
    def needed_hooks(cls) -> dict[str, Any]:
        """Return the hooks that are needed, by name, as the class that drives the trial has them."""
        return {name: hook for base in cls.__mro__[::-1] for name, hook in vars(base).items() if _is_needed(hook)}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Complete what the class, or a mixin that it derives from, overrides."""
        super().__init_subclass__(**kwargs)
        for name, hook in cls.needed_hooks().items():
            owner = next(base for base in cls.__mro__ if name in vars(base))
            is_new = owner is cls or not issubclass(owner, DrivenModule)
            if is_new and not _is_needed(vars(owner)[name]):
                setattr(cls, name, _completed(vars(owner)[name], hook))


def _completed(override: Any, hook: Any) -> Callable[..., Any]:
    """Return ``override``, followed by ``hook`` unless it has called that."""
    name = hook.__name__

    @functools.wraps(override)
    def completed(self: DrivenModule, *args: Any, **kwargs: Any) -> Any:
        self.called_hooks.discard(name)
        method = override.__get__(self, type(self)) if hasattr(override, "__get__") else override
        result = method(*args, **kwargs)
        if name in self.called_hooks:
            return result
        if hook.instead:
            raise errors.InvalidExperimentException(
                f"{type(self).__name__}.{name}() does not call super().{name}(), which a trial needs: {hook.instead}."
            )
        hook(self, *args, **kwargs)
        return result

    # Lightning looks for a step's parameters below one decorator, not below those of the override.
    completed.__wrapped__ = inspect.unwrap(override)
    return completed


def refuse_unsupported_methods(module: DrivenModule, trains: bool) -> None:
    """Raise an InvalidExperimentException that names each method of a subclass which cannot work, and the way out.

    If it ``trains``, or validates, that includes overrides of what a trial does not call.
    """
    needed = module.needed_hooks()
    wrong = {
        name: hook.instead or "define it in a subclass, or in a callback, not on an instance"
        for name, hook in needed.items()
        if overrides(module, type(module), name)
    }
    if trains:
        wrong |= {name: way for name, way in _UNUSED_METHODS.items() if overrides(module, pl.LightningModule, name)}
        for name in ("training_step", "validation_step"):
            if "dataloader_iter" not in inspect.signature(getattr(module, name)).parameters:
                wrong[name] = f"{needed[name].instead}; an override takes dataloader_iter, and passes it to super()"
    if wrong:
        raise errors.InvalidExperimentException(
            f"{type(module).__name__} has methods that a trial cannot be trained with: "
            + "; ".join(f"{name}(): {way}" for name, way in sorted(wrong.items()))
            + "."
        )


class WatchedHooks:
    """Which of Lightning's hooks are overridden by callbacks, or by a module derived from ``base``.

    Hooks set on an instance count too, since ``LambdaCallback`` sets them there.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, base: type[pl.LightningModule], taken: TakenFlags
    ) -> None:
        self._taken = taken
        self._trainer = trainer
        self._callbacks: list[pl.Callback] = getattr(trainer, "callbacks")  # noqa: B009 (set by a connector; mypy)
        self._module = module
        self._base = base
        self._profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        self._profiles = not isinstance(self._profiler, pl.profilers.PassThroughProfiler)
        self._of_updates = [hook for hook in _UPDATE_HOOKS if self._is_overridden(hook, self._callbacks)]

    def _is_overridden(self, hook: str, callbacks: list[pl.Callback]) -> bool:
        by_callback = any(overrides(callback, pl.Callback, hook) for callback in callbacks)
        return by_callback or overrides(self._module, self._base, hook)

    def needs_each_batch(self, stage: str) -> bool:
        """Return whether steps of ``stage`` must be single batches; bars and ``ModelCheckpoint`` by epoch need none."""
        if self._profiles or (stage == "train" and self._of_updates):
            return True
        callbacks = [
            c for c in self._callbacks if not isinstance(c, pl.callbacks.ProgressBar) and not _saves_by_epoch(c)
        ]
        return any(self._is_overridden(f"on_{stage}_batch_{end}", callbacks) for end in ("start", "end"))

    def may_end_run(self, hook: str) -> bool:
        cannot_ask = (pl.callbacks.EarlyStopping, pl.callbacks.ModelCheckpoint, pl.callbacks.ProgressBar)
        return self._is_overridden(hook, [c for c in self._callbacks if not isinstance(c, cannot_ask)])

    def attach(self, context: PyTorchTrialContext) -> None:
        hooks = context.update_hooks
        if self._taken.clip_val is not None or overrides(self._module, self._base, "configure_gradient_clipping"):
            hooks.clip.append(self._clip)
        if self._profiles:
            hooks.before_backward.append(lambda loss: self._profiler.start("backward"))
            hooks.before_step.append(lambda optimizer: self._profiler.start("optimizer_step"))
        for name in self._of_updates:
            call = functools.partial(lightning_internals.call_hook, self._trainer, name)
            getattr(hooks, _UPDATE_HOOKS[name]).append(call)
        if self._profiles:
            hooks.after_backward.append(lambda: self._profiler.stop("backward"))
            hooks.after_step.append(lambda: self._profiler.stop("optimizer_step"))
        if self._of_updates:
            hooks.after_step.append(
                lambda: lightning_internals.show_optimizer_steps(self._trainer, context.optimizer_steps)
            )

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        self._module.configure_gradient_clipping(optimizer, self._taken.clip_val, self._taken.clip_algorithm)


def _saves_by_epoch(callback: pl.Callback) -> bool:
    if type(callback) is not pl.callbacks.ModelCheckpoint:
        return False
    key = callback.state_key
    return "'every_n_train_steps': 0" in key and "'train_time_interval': None" in key
