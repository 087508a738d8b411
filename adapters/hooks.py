"""Decides which overridden hooks a trial calls, which are refused, and which must call ``super()``.

Change here: ``WatchedHooks.attach`` connects ``gradient_clip_val`` and the hooks of updates; the calls are in
``det_lightning/pytorch/_wrapped_parts.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from det_lightning import errors
from det_lightning.adapters import lightning_internals
from det_lightning.adapters.flags import InterceptedFlags
from det_lightning.adapters.lightning_package import pl
from det_lightning.engine.train_and_evaluate import find_overridden, overrides
from det_lightning.escaping import get_logger
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext

logger = get_logger(__name__)

# Methods of modules called by Lightning's own training, but not for a trial.
_UNUSED_METHODS = {
    "backward": "use on_before_backward() and on_after_backward()",
    "lr_scheduler_step": "wrap a scheduler in the trial, with wrap_lr_scheduler()",
    "on_after_batch_transfer": "change the batch in the trial's train_batch(), or in on_train_batch_start()",
    "on_before_batch_transfer": "change the batch in the trial's dataset, or in the collate_fn of its DataLoader",
    "optimizer_step": "use on_before_optimizer_step(), or step_optimizer() in the trial's train_batch()",
    "optimizer_zero_grad": "use on_before_zero_grad(), or step_optimizer(auto_zero_grads=False) in the trial",
    "transfer_batch_to_device": "move the batch in the trial, after context.experimental.disable_auto_to_device()",
}
# By Lightning's name of a hook, the context's list of such hooks.
_UPDATE_HOOKS = {
    "on_before_backward": "before_backward",
    "on_after_backward": "after_backward",
    "on_before_optimizer_step": "before_step",
    "on_before_zero_grad": "before_zero_grad",
}
_OF_BATCHES = [f"on_{stage}_batch_{end}" for stage in ("train", "validation") for end in ("start", "end")]
_WATCHED = [*_UPDATE_HOOKS, *_OF_BATCHES, "on_validation_end"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def requires_super(instead: str) -> Callable[[_Method], _Method]:
    """Mark a method whose result Lightning needs: overrides must call ``super()``; errors advise ``instead``."""

    def mark(method: _Method) -> _Method:
        method.instead = instead  # type: ignore[attr-defined]
        return method

    return mark


def _requires_super(attribute: Any) -> bool:
    return hasattr(attribute, "instead")


class DrivenModule(pl.LightningModule):
    """A module whose subclasses may override every hook, but must not replace one marked by :func:`requires_super`.

    Raises:
        InvalidExperimentException: a subclass hides an attribute that drives the trial, or a step does not take an
            iterator: the class statement raises the error. A run raises the error if an override did not call
            ``super()``.
    """

    called_super: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse(cls, _find_hidden_names(cls) or cls.find_wrong_steps())

    @classmethod
    def list_marked_methods(cls) -> dict[str, Any]:
        """Return the marked methods by name, from the classes that drive the trial."""
        return {
            name: method for base in cls.__mro__[::-1] for name, method in vars(base).items() if _requires_super(method)
        }

    @classmethod
    def find_wrong_steps(cls) -> dict[str, str]:
        """Return the mistakes of overridden steps that do not take an iterator, by name."""
        way = "an override takes dataloader_iter, below one decorator at most, and passes it to super()"
        return {
            name: f"{method.instead}; {way}"
            for name, method in cls.list_marked_methods().items()
            if name.endswith("_step") and not _requires_super(inspect.getattr_static(cls, name))
            if not lightning_internals.takes_dataloader_iter(getattr(cls, name))
        }

    def require_super_call(self, name: str) -> None:
        """Raise an InvalidExperimentException if no override has called the marked method."""
        if name not in self.called_super:
            call = f"{type(self).__name__}.{name}() has not called super().{name}()"
            _refuse(type(self), {name: f"{call}: {self.list_marked_methods()[name].instead}"})

    def require_same(self, name: str, used: Sequence[Any]) -> None:
        """Raise an InvalidExperimentException if Lightning ``used`` other objects than the marked method returned."""
        self.require_super_call(name)
        if list(map(id, used)) != list(map(id, self.called_super[name])):
            way = f"{type(self).__name__}.{name}() must return what super().{name}() returns"
            _refuse(type(self), {name: f"{way}: {self.list_marked_methods()[name].instead}"})


def _find_hidden_names(cls: type[DrivenModule]) -> dict[str, str]:
    """Return a message for each attribute of a user's class that hides one that drives the trial, by name."""
    found = {}
    for base in filter(_is_own, cls.__mro__):
        for name in vars(base).keys() - {*dir(pl.LightningModule)} if issubclass(base, DrivenModule) else ():
            if not _is_own(next(one for one in cls.__mro__ if name in vars(one))):
                found[name] = f"{base.__name__} has a {name} of its own, which drives the trial: rename that of yours"
    return found


def _is_own(base: type) -> bool:
    return base.__module__.startswith("det_lightning.")


def _refuse(module_class: type, wrong: Mapping[str, str]) -> None:
    if wrong:
        raise errors.InvalidExperimentException(
            f"{module_class.__name__} has methods that a trial cannot be trained with: "
            + "; ".join(f"{name}(): {way}" for name, way in sorted(wrong.items()))
            + "."
        )


def refuse_unsupported_methods(module: DrivenModule, trains: bool) -> None:
    """Raise an InvalidExperimentException naming each method of a subclass that cannot work, and the way out.

    If the module ``trains`` or validates, overrides of methods that a trial does not use are included.
    """
    marked = module.list_marked_methods()
    replaced = find_overridden(module, type(module), marked)
    unused = find_overridden(module, pl.LightningModule, _UNUSED_METHODS) if trains else []
    wrong = {name: marked[name].instead for name in replaced} | {name: _UNUSED_METHODS[name] for name in unused}
    wrong |= module.find_wrong_steps() if trains else {}
    _refuse(type(module), wrong)


class WatchedHooks:
    """Lightning's hooks with an override in a callback, or in a module derived from ``base``.

    Hooks set on an instance count too, as ``LambdaCallback`` sets them.

    Attributes:
        see_training_batches: each training step must be one batch. Progress bars and a ``ModelCheckpoint`` by epoch do
            not need this.
        see_validation_batches: the same for the validation.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        base: type[pl.LightningModule],
        intercepted: InterceptedFlags,
    ) -> None:
        self._intercepted = intercepted
        self._trainer = trainer
        callbacks: list[pl.Callback] = getattr(trainer, "callbacks")  # noqa: B009 (set by a connector; mypy)
        watched = [callback for callback in callbacks if not _saves_by_epoch(callback)]
        self._of_callbacks = [(callback, find_overridden(callback, pl.Callback, _WATCHED)) for callback in watched]
        self._of_module = find_overridden(module, base, _WATCHED)
        self._module = module
        self._clips = intercepted.clip_val is not None or overrides(module, base, "configure_gradient_clipping")
        self._profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        self._profiles = not isinstance(self._profiler, pl.profilers.PassThroughProfiler)
        self._has_warned = False
        self._of_updates = [hook for hook in _UPDATE_HOOKS if self._is_overridden(hook)]
        self.see_training_batches = self._see_batches("train")
        self.see_validation_batches = self._see_batches("validation")

    def _is_overridden(self, hook: str, but: tuple[type[pl.Callback], ...] = ()) -> bool:
        by_callback = any(hook in found for callback, found in self._of_callbacks if not isinstance(callback, but))
        return by_callback or hook in self._of_module

    def _see_batches(self, stage: str) -> bool:
        if self._profiles or (stage == "train" and self._of_updates):
            return True
        bars = (pl.callbacks.ProgressBar,)
        return any(self._is_overridden(f"on_{stage}_batch_{end}", bars) for end in ("start", "end"))

    def may_end_run(self, hook: str) -> bool:
        """Return whether an override of a hook may ask the run to stop."""
        cannot_ask = (pl.callbacks.EarlyStopping, pl.callbacks.ModelCheckpoint, pl.callbacks.ProgressBar)
        return self._is_overridden(hook, cannot_ask)

    def attach(self, context: PyTorchTrialContext) -> None:
        """Call Lightning's hooks of updates from a context's own hooks."""
        hooks = context.update_hooks
        if self._clips:
            hooks.clip.append(self._clip)
            hooks.before_own_clip.append(self._warn_of_own_clipping)
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

    def _warn_of_own_clipping(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._has_warned:
            self._has_warned = True
            clip_val = self._intercepted.clip_val
            flag = "configure_gradient_clipping()" if clip_val is None else f"gradient_clip_val={clip_val}"
            logger.warning(
                "%s has no effect on %s: the trial clips its gradients with step_optimizer(clip_grads=...). Leave out "
                "one of the two.",
                *(flag, type(optimizer).__name__),
            )

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        self._module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=self._intercepted.clip_val,
            gradient_clip_algorithm=self._intercepted.clip_algorithm,
        )


def _saves_by_epoch(callback: pl.Callback) -> bool:
    if type(callback) is not pl.callbacks.ModelCheckpoint:
        return False
    key = callback.state_key
    return "'every_n_train_steps': 0" in key and "'train_time_interval': None" in key
