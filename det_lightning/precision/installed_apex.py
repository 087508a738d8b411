"""Training with a build of NVIDIA's apex that still has ``apex.amp``, if one is installed and asked for."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from typing import Any

import torch

from det_lightning import errors
from det_lightning.distributed.backend import GradientExchange
from det_lightning.precision.apex_levels import refuse_scaler
from det_lightning.precision.scaling import LossScaling, number_of

logger = logging.getLogger(__name__)

#: The environment variable that chooses what implements ``configure_apex_amp``: ``torch`` (the default) or ``apex``.
VARIABLE = "DET_LIGHTNING_AMP"


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


class InstalledApex(LossScaling):
    """Leaves loss scaling and casts to ``apex.amp``, which unscales gradients at the end of each backward pass.

    It works in one process only, because apex patches models that are not wrapped yet.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        super().__init__(exchange)
        self.exchanges = True  # a batch begins with its first loss
        self._amp = _import_amp()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._count = 1
        self._losses: list[weakref.ref[torch.Tensor]] = []

    def initialize(self, models: Any, optimizers: Any, num_losses: int | None, **arguments: Any) -> tuple[Any, Any]:
        """Run ``apex.amp.initialize`` and keep its optimizers for :meth:`backward`."""
        self._count = num_losses or 1
        models, optimizers = self._amp.initialize(models, optimizers, num_losses=self._count, **arguments)
        self._optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        return models, optimizers

    def begin_batch(self, communicate: bool) -> None:
        self._losses.clear()
        super().begin_batch(communicate)

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        loss_id = 0 if self._count == 1 else number_of(loss, self._losses)
        with self._amp.scale_loss(loss, self._optimizers, loss_id=loss_id) as scaled:
            super().backward(scaled, gradient, retain_graph, create_graph)

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, which apex may have patched to skip it."""
        refuse_scaler(scaler)
        super().step(optimizer, None)

    def state_dict(self) -> dict[str, Any]:
        return {"amp_state": self._amp.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "amp_state" in state:
            self._amp.load_state_dict(state["amp_state"])
        else:
            logger.warning("The trial uses apex but the checkpoint has no 'amp_state'; loss scaling starts over.")
