"""apex's levels: on torch.amp, or by a build of NVIDIA's apex that still has ``apex.amp``, if that is asked for."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from typing import Any

import torch

from det_lightning import errors
from det_lightning.distributed.backend import Backend, GradientExchange
from det_lightning.precision.levels import DYNAMIC, Level
from det_lightning.precision.scaled_gradients import ScaledGradients
from det_lightning.precision.scaling import LossScaling, StepUnless

logger = logging.getLogger(__name__)

#: The environment variable that chooses what implements ``configure_apex_amp``: ``torch`` (the default) or ``apex``.
VARIABLE = "DET_LIGHTNING_AMP"


class LossScaler:
    """apex's loss scaler: one number on the device, which an overflow halves.

    ``growth_interval`` passes without an overflow double it. Only :meth:`state_dict` waits for the device. Scale,
    inverse and overflow have the shape ``()``.
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
        """Load what :meth:`state_dict` returned; a KeyError if an entry is missing."""
        self._scale.fill_(float(state["loss_scale"]))
        self._unskipped.fill_(int(state["unskipped"]))


class ApexScaling(LossScaling):
    """What both kinds have in common: the losses of a batch are numbered, and there is no scaler of torch.

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

    def number_of(self, loss: torch.Tensor) -> int:
        """Return the number of a loss, which may run backward more than once, among those of the batch."""
        for number, earlier in enumerate(self._losses):
            if earlier() is loss:
                return number
        self._losses.append(weakref.ref(loss))
        return len(self._losses) - 1

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, unless it is to be skipped; raise if there is a scaler of torch."""
        if scaler is not None:
            raise errors.InvalidExperimentException(
                f"step_optimizer(scaler=...) got a {type(scaler).__name__} after configure_apex_amp(), which scales "
                "losses itself: use either torch.amp or apex levels, not both."
            )
        super().step(optimizer, self._skipping(optimizer))

    def _skipping(self, optimizer: torch.optim.Optimizer) -> StepUnless | None:
        """Return what skips the next step of ``optimizer`` after an overflow."""
        return None  # apex patches the optimizer itself


class ApexLevels(ApexScaling):
    """Trains with the loss scaling of apex.

    The n-th loss of a batch is scaled by the n-th scaler, or every loss by the only one. Each backward pass unscales
    the gradients that it adds and adapts its scaler. If one of them is not finite, the next step of every optimizer
    that got gradients from the pass is skipped. ``masters`` maps parameters in half precision to the float32 ones that
    optimizers have instead.
    """

    def __init__(
        self,
        level: Level,
        backend: Backend,
        optimizers: list[torch.optim.Optimizer],
        masters: dict[torch.nn.Parameter, torch.nn.Parameter],
        growth_interval: int = 2000,
    ) -> None:
        super().__init__(backend.gradients, after_each_pass=level.scales)  # they are unscaled then
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
        """Run ``loss.backward`` on the scaled loss; afterwards the gradients are unscaled again."""
        if not self.level.scales:
            super().backward(loss.float(), gradient, retain_graph, create_graph)
            return
        scaler = self._scaler_of(loss)
        self._gradients.begin_pass()
        super().backward(scaler.scale(loss), gradient, retain_graph, create_graph)
        touched, overflow = self._gradients.end_pass(scaler.inverse())
        scaler.update(overflow)
        if scaler.dynamic:
            for optimizer in touched:
                earlier = self._overflows.get(optimizer)
                self._overflows[optimizer] = overflow if earlier is None else torch.maximum(earlier, overflow)

    def _scaler_of(self, loss: torch.Tensor) -> LossScaler:
        if len(self.scalers) == 1:
            return self.scalers[0]
        number = self.number_of(loss)
        if number >= len(self.scalers):
            raise errors.InvalidExperimentException(
                f"A batch called context.backward() with more than {len(self.scalers)} losses, and "
                f"configure_apex_amp(num_losses={len(self.scalers)}) has made that number of scalers. Raise it, "
                "or leave it at 1 to scale all losses alike."
            )
        return self.scalers[number]

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.level.scales:  # otherwise each backward pass has done so
            super().synchronize(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        super().step(optimizer, scaler)
        self._gradients.copy_to_halves(optimizer)

    def _skipping(self, optimizer: torch.optim.Optimizer) -> StepUnless | None:
        overflow = self._overflows.pop(optimizer, None)
        return None if overflow is None else StepUnless(overflow)

    def state_dict(self) -> dict[str, Any]:
        """Return apex's own state, under Determined's key."""
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

    def unfinished(self) -> dict[str, Any]:
        """Return the gradients of masters, and which optimizers are to skip a step."""
        overflows = [self._overflows.get(optimizer) for optimizer in self._optimizers]
        return {
            "overflows": [None if overflow is None else float(overflow) for overflow in overflows],
            "masters": self._gradients.of_masters(),
        }

    def load_unfinished(self, saved: dict[str, Any]) -> None:
        """Load what :meth:`unfinished` returned."""
        self._overflows.clear()
        for optimizer, overflow in zip(self._optimizers, saved.get("overflows", []), strict=False):
            if overflow is not None:
                self._overflows[optimizer] = torch.full((), overflow, device=self._device)
        self._gradients.load_masters(saved.get("masters", []))


def apex_is_wanted() -> bool:
    """Return whether the environment asks for NVIDIA's apex; raise a ValueError if it asks for something unknown."""
    choice = os.environ.get(VARIABLE) or "torch"
    if choice not in ("torch", "apex"):
        raise ValueError(f"{VARIABLE}={choice!r} in the environment: it may be 'torch' (the default) or 'apex'.")
    return choice == "apex"


def _import_amp() -> Any:
    advice = f"Unset {VARIABLE} to have the levels on torch.amp, or install a build of NVIDIA's apex from before 2025."
    try:
        apex = importlib.import_module("apex")
    except ImportError as e:
        raise errors.InvalidExperimentException(f"{VARIABLE}=apex, but apex cannot be imported: {e}. {advice}") from e
    try:
        amp = importlib.import_module("apex.amp")
    except ImportError as e:
        raise errors.InvalidExperimentException(
            f"{VARIABLE}=apex, but the apex that is installed ({apex.__file__}) has no apex.amp: it is the unrelated "
            f"package of that name on PyPI, or a newer build of NVIDIA's. {advice}"
        ) from e
    if not hasattr(amp, "scale_loss"):
        raise errors.InvalidExperimentException(f"{VARIABLE}=apex, but apex.amp has no scale_loss(). {advice}")
    return amp


class InstalledApex(ApexScaling):
    """Leaves loss scaling and casts to ``apex.amp``, which unscales gradients at the end of each backward pass.

    It works in one process only, because apex patches models that are not wrapped yet.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        super().__init__(exchange)
        self._amp = _import_amp()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._count = 1

    def initialize(self, models: Any, optimizers: Any, num_losses: int | None, **arguments: Any) -> tuple[Any, Any]:
        """Run ``apex.amp.initialize`` and keep its optimizers for :meth:`backward`."""
        self._count = num_losses or 1
        models, optimizers = self._amp.initialize(models, optimizers, num_losses=self._count, **arguments)
        self._optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        return models, optimizers

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        loss_id = 0 if self._count == 1 else self.number_of(loss)
        with self._amp.scale_loss(loss, self._optimizers, loss_id=loss_id) as scaled:
            super().backward(scaled, gradient, retain_graph, create_graph)

    def state_dict(self) -> dict[str, Any]:
        return {"amp_state": self._amp.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "amp_state" in state:
            self._amp.load_state_dict(state["amp_state"])
        else:
            logger.warning("The trial uses apex but the checkpoint has no 'amp_state'; loss scaling starts over.")
