"""apex's levels: on torch.amp, or with ``DET_LIGHTNING_AMP=apex`` by a build of NVIDIA's apex that has ``apex.amp``."""

from __future__ import annotations

import importlib
import os
import weakref
from typing import Any

import torch

from det_lightning import errors
from det_lightning.distributed.backend import Backend, GradientExchange
from det_lightning.escaping import get_logger
from det_lightning.precision.levels import DYNAMIC, Level
from det_lightning.precision.scaling import LossScaling, ScaledGradients

logger = get_logger(__name__)

#: The environment variable for the implementation of ``configure_apex_amp``: ``torch`` (the default) or ``apex``.
VARIABLE = "DET_LIGHTNING_AMP"


class LossScaler:
    """apex's loss scaler: one number on the device, halved by an overflow.

    ``growth_interval`` passes without an overflow double the scale. Only :meth:`state_dict` waits for the device.
    Scale, inverse and overflow have the shape ``()``.
    """

    def __init__(self, device: torch.device, level: Level, growth_interval: int) -> None:
        self.dynamic = level.loss_scale == DYNAMIC
        self._growth_interval = growth_interval
        self._bounds = (level.min_loss_scale, level.max_loss_scale)
        initial = 2.0**16 if self.dynamic else float(level.loss_scale)
        self._scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._unskipped = torch.zeros((), dtype=torch.int32, device=device)
        self._bound()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss in float32, times the scale."""
        return loss.float() * self._scale

    def inverse(self) -> torch.Tensor:
        """Return the factor to multiply gradients by."""
        return self._scale.reciprocal()

    def update(self, overflow: torch.Tensor) -> None:
        """Adapt the scale after a backward pass; ``overflow`` is not 0 if a gradient was not finite."""
        if not self.dynamic:
            self._unskipped += 1
            return
        torch._amp_update_scale_(self._scale, self._unskipped, overflow, 2.0, 0.5, self._growth_interval)
        self._bound()

    def _bound(self) -> None:
        if self.dynamic and self._bounds != (None, None):
            self._scale.clamp_(*self._bounds)

    def state_dict(self) -> dict[str, Any]:
        """Return apex's entry for one scaler."""
        return {"loss_scale": float(self._scale), "unskipped": int(self._unskipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; raise a KeyError if an entry is missing."""
        self._scale.fill_(float(state["loss_scale"]))
        self._unskipped.fill_(int(state["unskipped"]))


class ApexScaling(LossScaling):
    """The base of both implementations: numbers the losses of a batch, and refuses a scaler of torch.

    With ``after_each_pass``, gradients are exchanged after every backward pass.
    """

    def __init__(self, exchange: GradientExchange, after_each_pass: bool = False) -> None:
        super().__init__(exchange)
        self.exchanges = True  # a batch begins with its first loss
        self._after_each_pass = after_each_pass
        self._losses: list[weakref.ref[torch.Tensor]] = []

    def begin_batch(self, communicate: bool) -> None:
        self._losses.clear()
        super().begin_batch(communicate or self._after_each_pass)

    def number(self, loss: torch.Tensor) -> int:
        """Return the number of a loss in the batch; a loss that runs backward again keeps its number."""
        for number, earlier in enumerate(self._losses):
            if earlier() is loss:
                return number
        self._losses.append(weakref.ref(loss))
        return len(self._losses) - 1

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, or skip the step after an overflow; raise if ``scaler`` is given."""
        if scaler is not None:
            raise errors.InvalidExperimentException(
                f"step_optimizer(scaler=...) got a {type(scaler).__name__} after configure_apex_amp(), which scales "
                "losses itself: use either torch.amp or apex levels, not both."
            )
        super().step(optimizer, None)


class ApexLevels(ApexScaling):
    """Trains with the loss scaling of apex.

    The n-th scaler scales the n-th loss of a batch; a single scaler scales every loss. Each backward pass unscales the
    new gradients and adapts the scaler. After a gradient that is not finite, the next step of every optimizer with
    gradients of the pass is skipped. ``masters`` maps parameters in half precision to the float32 parameters in the
    optimizers.
    """

    def __init__(
        self,
        level: Level,
        backend: Backend,
        optimizers: list[torch.optim.Optimizer],
        masters: dict[torch.nn.Parameter, torch.nn.Parameter],
        growth_interval: int = 2000,
    ) -> None:
        super().__init__(backend.gradients, after_each_pass=level.scales)
        self.level = level
        self._device = backend.device
        self._optimizers = optimizers
        self._gradients = ScaledGradients(backend, optimizers, masters)
        self.masters = list(masters.values())
        self.scalers = [LossScaler(backend.device, level, growth_interval) for _ in range(level.num_losses)]
        self._overflows: dict[torch.optim.Optimizer, torch.Tensor] = {}

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward`` on the scaled loss, and unscale the gradients."""
        if not self.level.scales:
            super().backward(loss.float(), gradient, retain_graph, create_graph)
            return
        scaler = self._choose_scaler(loss)
        self._gradients.begin_pass()
        super().backward(scaler.scale(loss), gradient, retain_graph, create_graph)
        touched, overflow = self._gradients.end_pass(scaler.inverse())
        scaler.update(overflow)
        if scaler.dynamic:
            for optimizer in touched:
                earlier = self._overflows.get(optimizer)
                self._overflows[optimizer] = overflow if earlier is None else torch.maximum(earlier, overflow)

    def _choose_scaler(self, loss: torch.Tensor) -> LossScaler:
        if len(self.scalers) == 1:
            return self.scalers[0]
        number = self.number(loss)
        if number >= len(self.scalers):
            raise errors.InvalidExperimentException(
                f"A batch called context.backward() with more than {len(self.scalers)} losses after "
                f"configure_apex_amp(num_losses={len(self.scalers)}). Raise num_losses, or leave 1 to scale all losses "
                "alike."
            )
        return self.scalers[number]

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.level.scales:  # otherwise each backward pass has synchronized
            super().synchronize(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        overflow = self._overflows.pop(optimizer, None)
        if overflow is None or scaler is not None or not overflow.item():
            super().step(optimizer, scaler)
        self._gradients.copy_to_halves(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in apex's format, under Determined's key."""
        return {"amp_state": {f"loss_scaler{index}": s.state_dict() for index, s in enumerate(self.scalers)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load apex's state; warn about missing parts."""
        if "amp_state" not in state:
            logger.warning(
                "The trial uses apex levels but the checkpoint has no 'amp_state'; loss scaling starts over."
            )
            return
        saved = state["amp_state"]
        if len(saved) != len(self.scalers):
            logger.warning(
                "The checkpoint has the states of %d loss scalers, and configure_apex_amp(num_losses=%d) made %d; the "
                "states that fit are loaded.",
                *(len(saved), len(self.scalers), len(self.scalers)),
            )
        for index, scaler in enumerate(self.scalers):
            if (entry := saved.get(f"loss_scaler{index}")) is not None:
                scaler.load_state_dict(entry)

    def collect_partial(self) -> dict[str, Any]:
        """Return the gradients of masters, and the overflow of each optimizer that must skip a step."""
        overflows = [self._overflows.get(optimizer) for optimizer in self._optimizers]
        return {
            "overflows": [None if overflow is None else float(overflow) for overflow in overflows],
            "masters": self._gradients.collect_masters(),
        }

    def load_partial(self, saved: dict[str, Any]) -> None:
        """Load the result of :meth:`collect_partial`."""
        self._overflows.clear()
        for optimizer, overflow in zip(self._optimizers, saved.get("overflows", []), strict=False):
            if overflow is not None:
                self._overflows[optimizer] = torch.full((), overflow, device=self._device)
        self._gradients.load_masters(saved.get("masters", []))


def wants_apex() -> bool:
    """Return whether the environment asks for NVIDIA's apex; raise a ValueError for an unknown choice."""
    choice = os.environ.get(VARIABLE) or "torch"
    if choice not in ("torch", "apex"):
        raise ValueError(f"{VARIABLE} must be 'torch' (the default) or 'apex'; got {choice!r}.")
    return choice == "apex"


def _import_amp() -> Any:
    try:
        return importlib.import_module("apex.amp")
    except ImportError as e:
        raise errors.InvalidExperimentException(
            f"{VARIABLE}=apex, but apex.amp cannot be imported: {e}. The package apex on PyPI is unrelated, and "
            f"NVIDIA's has no apex.amp since 2025. Unset {VARIABLE} to have the levels on torch.amp, or install an "
            "older build of NVIDIA's apex."
        ) from e


class InstalledApex(ApexScaling):
    """Leaves loss scaling and casts to ``apex.amp``; gradients are unscaled at the end of each backward pass.

    Works in one process only, because apex patches models that are not wrapped yet.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        super().__init__(exchange)
        self._amp = _import_amp()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._count = 1

    def initialize(self, models: Any, optimizers: Any, num_losses: int | None, **arguments: Any) -> tuple[Any, Any]:
        """Run ``apex.amp.initialize``, and keep the returned optimizers for :meth:`backward`."""
        self._count = num_losses or 1
        models, optimizers = self._amp.initialize(models, optimizers, num_losses=self._count, **arguments)
        self._optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        return models, optimizers

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        loss_id = 0 if self._count == 1 else self.number(loss)
        with self._amp.scale_loss(loss, self._optimizers, loss_id=loss_id) as scaled:
            super().backward(scaled, gradient, retain_graph, create_graph)

    def state_dict(self) -> dict[str, Any]:
        return {"amp_state": self._amp.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "amp_state" in state:
            self._amp.load_state_dict(state["amp_state"])
        else:
            logger.warning("The trial uses apex but the checkpoint has no 'amp_state'; loss scaling starts over.")
