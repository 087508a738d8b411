"""Loss scaling: the common base, scaling by ``torch.amp``, and steps skipped when gradients overflow."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from det_lightning.distributed.backend import GradientExchange
from det_lightning.escaping import get_logger

logger = get_logger(__name__)


class LossScaling:
    """Scales losses between a context and a :class:`GradientExchange`; the base class only forwards to the exchange."""

    def __init__(self, exchange: GradientExchange) -> None:
        self._exchange = exchange
        self.exchanges = exchange.exchanges
        #: The float32 parameters that optimizers update in place of the models' parameters.
        self.masters: list[torch.nn.Parameter] = []

    def begin_batch(self, communicate: bool) -> None:
        self._exchange.begin_batch(communicate)

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward`` on the scaled loss."""
        self._exchange.backward(loss, gradient, retain_graph, create_graph)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        self._exchange.synchronize(optimizer)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the scaling of the gradients of ``optimizer``, before gradients are clipped or read."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, through ``scaler`` if given, unless scaled gradients overflowed."""
        self._exchange.step(optimizer, scaler)

    def end_batch(self) -> None:
        """End a training batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the entries for ``state_dict.pth`` besides the state of ``context.scaler``, by key."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the entries of :meth:`state_dict` from the content of a ``state_dict.pth``; warn of unused entries."""
        if "amp_state" in state:
            logger.warning("The checkpoint has the state of apex's loss scalers, which the trial does not configure.")

    def collect_partial(self) -> dict[str, Any]:
        """Return the state of an unfinished aggregation besides the gradients of the models' parameters."""
        return {}

    def load_partial(self, saved: dict[str, Any]) -> None:
        """Load the result of :meth:`collect_partial`, maybe an empty dict."""


class TorchAmp(LossScaling):
    """Scales each loss and steps through one scaler, updated once per batch if any optimizer has stepped."""

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


def make_scaler(like: torch.amp.GradScaler | None = None, device: str = "cuda") -> torch.amp.GradScaler:
    """Return a scaler with the settings of ``like``, or torch's defaults; disabled without a GPU."""
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
        return torch.amp.GradScaler(device, **settings)


class StepUnless:
    """Stands in for a gradient scaler once gradients are unscaled; ``overflow`` has the shape ``()``."""

    def __init__(self, overflow: torch.Tensor) -> None:
        self._overflow = overflow

    def step(self, optimizer: Any) -> None:
        """Step ``optimizer`` if the overflow is 0; otherwise leave parameters and state unchanged.

        An optimizer made with ``fused=True`` decides on the device; for others the host waits for the flag.
        """
        if not _decides_on_device(optimizer):
            if not self._overflow.item():
                optimizer.step()
            return
        _begin_momentum(optimizer)
        # torch's GradScaler passes the flag to a fused optimizer in the same way.
        optimizer.found_inf = self._overflow
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf


def _decides_on_device(optimizer: Any) -> bool:
    # A loaded state may not be fused. With dampening, a skipped first step lacks the gradient that begins the momentum.
    waits = (not g.get("fused", True) or (g.get("momentum") and g.get("dampening")) for g in optimizer.param_groups)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not any(waits)


def _begin_momentum(optimizer: Any) -> None:
    """Create SGD's momentum before the first step; a skipped first step would leave the momentum undefined."""
    for parameter in (p for group in optimizer.param_groups if group.get("momentum") for p in group["params"]):
        state = optimizer.state[parameter]
        if parameter.grad is not None and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
