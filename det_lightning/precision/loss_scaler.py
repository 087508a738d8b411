"""apex's loss scaler: one number on the device, which an overflow halves and a long time without one doubles."""

from __future__ import annotations

from typing import Any

import torch


class LossScaler:
    """Scales a loss so that small gradients do not vanish in half precision.

    Only :meth:`state_dict` waits for the device. Scale, inverse and overflow have the shape ``()``.

    Args:
        dynamic: adapt the scale; otherwise it stays at ``initial``.
        factor: an overflow divides the scale by it; ``window`` backward passes without one multiply it.
        minimum, maximum: bounds of a dynamic scale.
    """

    def __init__(
        self,
        device: torch.device,
        dynamic: bool = True,
        *,
        initial: float = 2.0**16,
        factor: float = 2.0,
        window: int = 2000,
        minimum: float | None = None,
        maximum: float | None = 2.0**24,
    ) -> None:
        self.dynamic = dynamic
        self._factor = factor
        self._window = window
        self._bounds = {name: bound for name, bound in (("min", minimum), ("max", maximum)) if bound is not None}
        self._scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._unskipped = torch.zeros((), dtype=torch.int32, device=device)
        self._bound()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss in float32, times the scale."""
        return loss.float() * self._scale

    def inverse(self) -> torch.Tensor:
        """Return what gradients must be multiplied by."""
        return self._scale.reciprocal()

    def update(self, overflow: torch.Tensor) -> None:
        """Adapt the scale after a backward pass; ``overflow`` is not 0 if a gradient was not finite."""
        if not self.dynamic:
            self._unskipped += 1
            return
        backoff = 1 / self._factor
        torch._amp_update_scale_(self._scale, self._unskipped, overflow, self._factor, backoff, self._window)
        self._bound()

    def _bound(self) -> None:
        if self.dynamic and self._bounds:
            self._scale.clamp_(**self._bounds)

    def state_dict(self) -> dict[str, Any]:
        """Return apex's entry for one scaler."""
        return {"loss_scale": float(self._scale), "unskipped": int(self._unskipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a KeyError if an entry is missing."""
        self._scale.fill_(float(state["loss_scale"]))
        self._unskipped.fill_(int(state["unskipped"]))
