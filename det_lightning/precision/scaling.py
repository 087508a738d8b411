"""Loss scaling: the common base, and scaling by ``torch.amp``."""

from __future__ import annotations

import logging
import warnings
import weakref
from typing import Any

import torch

from det_lightning.distributed.backend import GradientExchange
from det_lightning.precision.stepping import StepUnless

logger = logging.getLogger(__name__)


class LossScaling:
    """Scales losses between a context and the exchange of gradients, to which it forwards what is not overridden.

    :meth:`begin_batch` and :meth:`synchronize` need to be called only if it ``exchanges``.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._exchange = exchange
        self.exchanges = exchange.exchanges

    def begin_batch(self, communicate: bool) -> None:
        """Begin a training batch; ``communicate`` if optimizers step on it."""
        self._exchange.begin_batch(communicate)

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward`` on the scaled loss."""
        self._exchange.backward(loss, gradient, retain_graph, create_graph)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the gradients of ``optimizer`` over all ranks."""
        self._exchange.synchronize(optimizer)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the scaling of the gradients of ``optimizer``, before anything looks at them."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, through ``scaler`` if given, unless scaled gradients overflowed."""
        self._exchange.step(optimizer, scaler)

    def end_batch(self) -> None:
        """End a training batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs in ``state_dict.pth`` in addition to the state of ``context.scaler``, by key."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, from the content of a ``state_dict.pth``; warn of anything left."""
        if "amp_state" in state:
            logger.warning("The checkpoint has the state of apex's loss scalers, which the trial does not configure.")

    def unfinished(self) -> dict[str, Any]:
        """Return what an unfinished aggregation has collected besides the gradients of the models' parameters."""
        return {}

    def load_unfinished(self, saved: dict[str, Any]) -> None:
        """Load what :meth:`unfinished` returned, which may be empty."""


def number_of(loss: torch.Tensor, seen: list[weakref.ref[torch.Tensor]]) -> int:
    """Return the number of a loss, which may run backward more than once, among those ``seen`` in a batch."""
    for number, earlier in enumerate(seen):
        if earlier() is loss:
            return number
    seen.append(weakref.ref(loss))
    return len(seen) - 1


class TorchAmp(LossScaling):
    """Scales each loss and steps through one scaler, which is updated once per batch if any optimizer has stepped."""

    def __init__(self, scaler: Any, exchange: GradientExchange) -> None:
        super().__init__(exchange)
        self._scaler = scaler
        self._stepped = False

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        super().backward(self._scaler.scale(loss), gradient, retain_graph, create_graph)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        super().step(optimizer, self._scaler if scaler is None else scaler)
        self._stepped |= scaler is None or scaler is self._scaler

    def end_batch(self) -> None:
        if self._stepped:
            self._stepped = False
            self._scaler.update()


class _Scaler(torch.amp.GradScaler):
    """torch's scaler, but it leaves skipping a step to the device if the optimizer supports that."""

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        found = list(optimizer_state["found_inf_per_device"].values())
        if len(found) == 1 and not args and not kwargs:
            StepUnless(found[0]).step(optimizer)
            return None
        overflowed = sum(value.item() for value in found)
        return None if overflowed else optimizer.step(*args, **kwargs)


def make_scaler(like: torch.amp.GradScaler | None = None, device: str = "cuda") -> torch.amp.GradScaler:
    """Return a scaler with the settings of another one; it is disabled if the GPU is not available."""
    settings: dict[str, Any] = {}
    if like is not None and like.is_enabled():
        settings = {
            "init_scale": like.get_scale(),
            "growth_factor": like.get_growth_factor(),
            "backoff_factor": like.get_backoff_factor(),
            "growth_interval": like.get_growth_interval(),
        }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but CUDA is not available.*")
        return _Scaler(device, **settings)
