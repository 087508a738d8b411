"""Lightning's hooks that look at single batches, backward passes and optimizer steps of a trial."""

from __future__ import annotations

import functools
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from pytorch_lightning.profilers import PassThroughProfiler

from det_lightning.adapters import lightning_internals
from det_lightning.adapters.flags import TakenFlags
from det_lightning.engine.events import overrides
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext

# By Lightning's name of a hook, that of the list in which a context keeps it.
_UPDATE_HOOKS = {
    "on_before_backward": "before_backward",
    "on_after_backward": "after_backward",
    "on_before_optimizer_step": "before_step",
    "on_before_zero_grad": "before_zero_grad",
}


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
        self._profiles = not isinstance(self._profiler, PassThroughProfiler)
        self._of_updates = [hook for hook in _UPDATE_HOOKS if self._is_overridden(hook, self._callbacks)]

    def _is_overridden(self, hook: str, callbacks: list[pl.Callback]) -> bool:
        by_callback = any(overrides(callback, pl.Callback, hook) for callback in callbacks)
        return by_callback or overrides(self._module, self._base, hook)

    def needs_each_batch(self, stage: str) -> bool:
        """Return whether steps of ``stage`` must be single batches; bars and ``ModelCheckpoint`` by epoch need none."""
        if self._profiles or (stage == "train" and self._of_updates):
            return True
        callbacks = [c for c in self._callbacks if not isinstance(c, ProgressBar) and not _saves_by_epoch(c)]
        return any(self._is_overridden(f"on_{stage}_batch_{end}", callbacks) for end in ("start", "end"))

    def may_end_run(self, hook: str) -> bool:
        cannot_ask = (EarlyStopping, ModelCheckpoint, ProgressBar)
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
    if type(callback) is not ModelCheckpoint:
        return False
    key = callback.state_key
    return "'every_n_train_steps': 0" in key and "'train_time_interval': None" in key
