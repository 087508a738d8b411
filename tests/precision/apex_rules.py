"""What NVIDIA documents of apex.amp, as a plain PyTorch loop: the tests of the levels compare with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass
class PlainScaler:
    """A loss scale that an overflow halves, and ``window`` passes without one double."""

    scale: float
    dynamic: bool
    window: int
    min_loss_scale: float = 0.0
    max_loss_scale: float = 2.0**24
    unskipped: int = 0

    def update(self, overflow: bool) -> bool:
        """Return whether to skip the step."""
        if overflow and self.dynamic:
            self.scale = max(self.min_loss_scale, self.scale / 2)
            self.unskipped = 0
            return True
        self.unskipped += 1
        if self.dynamic and self.unskipped == self.window:
            self.scale = min(self.max_loss_scale, self.scale * 2)
            self.unskipped = 0
        return False


class PlainLoop:
    """One model and one optimizer, trained as apex documents its levels, with bfloat16 for half precision.

    Attributes:
        scales, skipped: the scale after each batch, and which batches were skipped.
    """

    def __init__(
        self,
        level: str,
        model: torch.nn.Module,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        scale: float | None,
        **rules: Any,
    ) -> None:
        self.level, self.model = level, model
        self.masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
        if level in ("O2", "O3"):
            for module in model.modules():
                if level == "O3" or not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                        if tensor.is_floating_point():
                            tensor.data = tensor.data.bfloat16()
        self.optimizer = make_optimizer(self.masters if level == "O2" else list(model.parameters()))
        dynamic = scale is None and level in ("O1", "O2")
        self.scaler = PlainScaler(2.0**16 if dynamic else scale or 1.0, dynamic, **rules)
        self.scales: list[float] = []
        self.skipped: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.level == "O1":
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(inputs).float()
        return self.model(inputs.bfloat16() if self.level in ("O2", "O3") else inputs).float()

    def train(self, batches: list[Any], loss_of: Callable[[torch.Tensor, Any, int], torch.Tensor], clip: float) -> None:
        for index, (inputs, targets) in enumerate(batches):
            scale = self.scaler.scale
            (loss_of(self.forward(inputs), targets, index) * scale).backward()
            parameters = list(self.model.parameters())
            updated = self.masters if self.level == "O2" else parameters
            for parameter, target in zip(parameters, updated, strict=True):
                gradient = parameter.grad
                parameter.grad = None
                # What the optimizer sees is unscaled, in the precision of what it updates.
                target.grad = gradient.to(target.dtype) * (1 / scale)
            overflow = not all(bool(p.grad.isfinite().all()) for p in updated)
            if self.scaler.update(overflow):
                self.skipped.append(index)
            else:
                if clip:
                    torch.nn.utils.clip_grad_norm_(updated, clip)
                self.optimizer.step()
            self.optimizer.zero_grad()
            if self.level == "O2":
                with torch.no_grad():
                    for half, master in zip(parameters, updated, strict=True):
                        half.copy_(master)
            self.scales.append(self.scaler.scale)
