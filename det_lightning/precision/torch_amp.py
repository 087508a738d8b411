"""torch's own mixed precision with one scaler that the context uses by itself."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from det_lightning.distributed.backend import GradientPath
from det_lightning.precision.scaling import LossScaling
from det_lightning.precision.stepping import step_unless


class _Scaler(torch.amp.GradScaler):
    """torch's scaler, which skips a step on the device where the optimizer can."""

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        found = list(optimizer_state["found_inf_per_device"].values())
        if args or kwargs or len(found) != 1:
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        step_unless(found[0], optimizer)
        return None


def make_scaler(like: torch.amp.GradScaler | None = None, device: str = "cuda") -> torch.amp.GradScaler:
    """Return a scaler with the settings of another one; for a GPU that is not there it is disabled."""
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


class TorchAmp(LossScaling):
    """Scales each loss and steps through one scaler, which is updated once a batch, if any optimizer has stepped."""

    def __init__(self, scaler: Any, path: GradientPath) -> None:
        super().__init__(path)
        self._scaler = scaler
        self._stepped = False

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        super().backward(self._scaler.scale(loss), gradient, retain_graph, create_graph)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, through its own scaler unless the trial gave one."""
        super().step(optimizer, self._scaler if scaler is None else scaler)
        self._stepped |= scaler is None or scaler is self._scaler

    def end_batch(self) -> None:
        """Update the scaler, if any optimizer has stepped."""
        if self._stepped:
            self._stepped = False
            self._scaler.update()
